from roundelay.bench.network import Row
from roundelay.reports.plots.network import plot_rows


def test_a_strategy_has_one_line_style_and_one_name_in_the_legend_whatever_the_number_of_seeds(tmp_path):
    path = tmp_path / "network.svg"
    rows = [
        Row("50mbit", strategy, 1.0, 1.0, [(1.0, 3.0 + seed), (2.0, 2.0)], seed=seed)
        for seed in range(3)
        for strategy in ("ddp", "local-sgd pairs int8")
    ]
    plot_rows(rows, path)
    drawn = path.read_text()
    assert drawn.count("<!-- ddp -->") == drawn.count("<!-- local-sgd pairs int8 -->") == 1
    assert drawn.count("stroke: #555555") == 3 + 1  # lines, and the legend
    assert "stroke-dasharray" not in drawn.partition("legend_1")[2]
