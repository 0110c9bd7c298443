"""Hub5 scoring: NIST's program if it is installed, and a stored report of it."""

import pytest

from roundelay.errors import SpeechError
from roundelay.speech.hub5 import Hub5Score, Turn, by_part, hub5, hubscr, write_hub5_ctm
from roundelay.speech.segments import segments

STM = """;; LABEL "O" "Overall" "Overall"
;; LABEL "SWB" "Switchboard" "Switchboard data"
;; LABEL "CH" "CallHome" "CallHome data"
sw_4390 A sw_4390_A 0.00 2.00 <O,SWB> i think (%HESITATION) so
sw_4390 B sw_4390_B 2.00 4.00 <O,SWB> okay that's fine
en_4156 A en_4156_A 0.00 3.00 <O,CH> how are you doing today
"""
GLM = """;; what counts as the same
* name "tiny.glm"
[OKAY] => [OK] / [ ] __ [ ]
[UH]   => %HESITATION / [ ] __ [ ]
"""
REPORT = """
     | SPKR      | # Snt # Wrd | Corr    Sub    Del    Ins    Err  S.Err |
     |-----------+-------------+-----------------------------------------|
     | en_4156_a |    1      5 |    4      0      1      0      1      1 |
     | sw_4390_a |    1      4 |    4      0      0      2      2      0 |
     | sw_4390_b |    1      3 |    2      1      0      0      1      1 |
     | Sum       |    3     12 |   10      1      1      2      4      2 |
     |   Mean    |  1.0    4.0 |  3.3    0.3    0.3    0.0    0.7    0.7 |
"""


def turn(recording, channel, start_s, text):
    return Turn(
        recording, channel, start_s, segments((word, 0.1 + 0.3 * i, 0.2) for i, word in enumerate(text.split()))
    )


TURNS = [
    turn("sw_4390", "B", 2.0, "OK THAT'S MINE"),
    turn("sw_4390", "A", 0.0, "I THINK UH SO"),
    turn("en_4156", "A", 0.0, "HOW ARE DOING TODAY"),
]


def test_parts_are_summed_over_their_speakers():
    scores = by_part(REPORT)
    assert scores["switchboard"] == Hub5Score(7, substitutions=1, deletions=0, insertions=2)
    assert scores["callhome"] == Hub5Score(5, substitutions=0, deletions=1, insertions=0)
    assert scores["all"] == scores["switchboard"] + scores["callhome"]
    assert scores["switchboard"].wer == pytest.approx(3 / 7)


def test_a_report_without_speakers_is_refused():
    with pytest.raises(SpeechError, match="no speaker"):
        by_part("")


def test_times_in_the_ctm_are_those_of_the_conversation(tmp_path):
    write_hub5_ctm(tmp_path / "hypothesis.ctm", TURNS)
    lines = (tmp_path / "hypothesis.ctm").read_text().splitlines()
    assert lines[0] == "en_4156 A 0.10 0.20 HOW"
    assert "sw_4390 B 2.40 0.20 THAT'S" in lines
    assert len(lines) == 11


def test_a_missing_program_is_named_with_the_package_that_has_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("roundelay.speech.hub5._DEBIAN", tmp_path / "hubscr.pl")
    with pytest.raises(SpeechError, match="package 'sctk'"):
        hubscr()


def program_missing():
    try:
        hubscr()
    except SpeechError:
        return True
    return False


needs_sctk = pytest.mark.skipif(program_missing(), reason="NIST's hubscr.pl is not installed (Debian's package sctk)")


@needs_sctk
def test_nists_program_maps_hesitations_and_counts_errors(tmp_path):
    (tmp_path / "ref.stm").write_text(STM)
    (tmp_path / "tiny.glm").write_text(GLM)
    scores = hub5(TURNS, tmp_path / "ref.stm", tmp_path / "tiny.glm", tmp_path / "out")
    assert scores["switchboard"] == Hub5Score(7, substitutions=1)
    assert scores["callhome"] == Hub5Score(5, deletions=1)
    assert (tmp_path / "out" / "hypothesis.ctm.filt.pra").exists()


@needs_sctk
def test_a_reference_that_nists_program_refuses_is_reported(tmp_path):
    (tmp_path / "ref.stm").write_text("nonsense\n")
    (tmp_path / "tiny.glm").write_text(GLM)
    with pytest.raises(SpeechError, match=r"hubscr\.pl failed|no speaker"):
        hub5(TURNS, tmp_path / "ref.stm", tmp_path / "tiny.glm", tmp_path / "out")
