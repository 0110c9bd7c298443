"use strict";
// Draws the charts from the data in #report, in the colours of page.css. Draws them again when axis, runs, scheme or width change.
(() => {
  const report = JSON.parse(document.getElementById("report").textContent);
  const plots = [...document.querySelectorAll(".plot")];
  const hidden = new Set(), logarithmic = new Set();
  let axis = "time";

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const faded = (hex, strength) => hex + Math.round(255 * strength).toString(16).padStart(2, "0");
  const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  // A tone of a colour: towards the ink below 0, towards the card above. As `toned` in charts.py.
  function toned(name, tone) {
    const [own, other] = [colour(name), colour(tone < 0 ? "ink" : "card")].map(channels);
    return "#" + own.map((value, i) => Math.round(value + Math.abs(tone) * (other[i] - value)).toString(16).padStart(2, "0")).join("");
  }
  const along = (x) => (axis === "time" ? x.time.map((s) => s / report.seconds) : x.samples);
  // Escape strings from a run's files, because plotly interprets some tags in labels.
  const text = (value) => String(value).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  const titled = (words) => ({ text: words, font: { size: 12 } });
  // Charts of small numbers have exponents (7.7e-4), those of large numbers all digits (20,000; plotly's own are 770µ and 20k).
  const largest = (trace) => Math.max(trace.top || 0, ...(trace.high || trace.y));
  const large = (chart) => Math.max(chart.top || 0, ...chart.traces.map(largest)) >= 1000;
  const digits = (chart) => (large(chart) ? ",.4~r" : ".4~g");
  const isHeat = (chart) => chart.traces.some((trace) => trace.style === "heat");

  function named(trace) {
    return text([trace.label, trace.name].filter(Boolean).join(" "));
  }

  function line(trace, chart) {
    const faint = trace.style === "faint", points = trace.style === "points" || trace.y.length === 1;
    const marked = trace.style === "marked" && trace.y.length < 40;
    const ink = toned(trace.colour, trace.tone || 0);
    return [{
      type: "scatter", name: named(trace), x: along(trace.x), y: trace.y,
      mode: points ? "markers" : marked ? "lines+markers" : "lines",
      line: { color: faint ? faded(ink, 0.45) : ink, width: faint ? 1.2 : 2, dash: trace.dashed ? "dash" : "solid" },
      marker: { size: points ? 9 : 5, symbol: trace.style === "points" ? "diamond" : "circle", color: ink },
      hovertemplate: `%{y:${digits(chart)}}`,
    }];
  }

  function band(trace) {
    const edge = { type: "scatter", mode: "lines", x: along(trace.x), line: { width: 0 }, hoverinfo: "skip" };
    const fill = faded(colour(trace.colour), trace.strength);
    return [{ ...edge, y: trace.low }, { ...edge, y: trace.high, fill: "tonexty", fillcolor: fill }];
  }

  function bar(trace) {
    return [{
      type: "bar", name: named(trace), x: trace.x, y: trace.y, marker: { color: colour(trace.colour) },
      hovertemplate: "%{y:.3~g} ms",
    }];
  }

  function heat(trace, chart) {
    const matrix = chart.kind === "matrix";
    return [{
      type: "heatmap", x: matrix ? trace.x : along(trace.x), y: trace.y, z: trace.z,
      zmin: 0, zmax: trace.top, hoverongaps: false,
      colorscale: [[0, colour("low")], [1, colour("high")]],
      colorbar: { thickness: 8, outlinewidth: 0, tickfont: { color: colour("soft") }, ...numerals(large(chart)) },
      hovertemplate: (matrix ? "learner %{y} called learner %{x}: %{z:,} times" : `learner %{y}: %{z:${digits(chart)}}`) + "<extra></extra>",
    }];
  }

  const draw = { line, marked: line, faint: line, points: line, band, bar, heat };

  // Events of these runs, as triangles at the bottom of a chart.
  function marks(runs) {
    const shown = report.marks.filter((mark) => runs.has(mark.run));
    return {
      type: "scatter", mode: "markers", name: "", yaxis: "y2",
      x: along({ time: shown.map((mark) => mark.x.time), samples: shown.map((mark) => mark.x.samples) }),
      y: shown.map(() => 0.04), text: shown.map((mark) => text(mark.text)),
      marker: { symbol: "triangle-up", size: 9, color: shown.map((mark) => colour(mark.colour)) },
      hovertemplate: "%{text}<extra></extra>",
    };
  }

  // The exponent of plotly's ticks begins at 10^4 and 10^-4, or with whole numbers at 10^13.
  const numerals = (whole) => ({ exponentformat: "e", separatethousands: true, minexponent: whole ? 12 : 3 });

  function axes(chart, plot) {
    const shared = {
      gridcolor: colour("grid"), linecolor: colour("line"), zeroline: false, automargin: true,
      fixedrange: matchMedia("(pointer: coarse)").matches,  // on a touch screen a drag scrolls the page instead of zooming
    };
    const x = { ...shared, ...numerals(true), showgrid: false, showline: true, ticks: "outside", tickcolor: colour("line") };
    const y = { ...shared, ...numerals(large(chart)), title: titled(chart.y) };
    if (chart.kind === "curves") {
      x.title = titled(axis === "time" ? `${report.time} (${report.unit})` : "samples");
      x.hoverformat = axis === "time" ? ".4~g" : ",d";
      x.rangemode = isHeat(chart) ? "normal" : "tozero";
    } else {
      Object.assign(x, { title: titled(chart.x), tickformat: "d" });
      if (chart.traces[0].x.length <= 16) x.dtick = 1;
    }
    if (isHeat(chart)) Object.assign(y, { showgrid: false, tickformat: "d" });
    if (chart.kind === "bars") y.rangemode = "tozero";
    if (chart.kind === "matrix") {
      x.constrain = "domain";
      Object.assign(y, { autorange: "reversed", scaleanchor: "x", constrain: "domain" });
    }
    if (logarithmic.has(plot.dataset.chart)) {
      y.type = "log";
      const least = Math.min(...chart.traces.flatMap((trace) => trace.low || trace.y).filter((value) => value > 0));
      if (Math.max(...chart.traces.map(largest)) < 1000 * least) Object.assign(y, { dtick: "D2", tickformat: ",~r" });  // 0.1, 0.2, 0.5
    }
    if (chart.top && y.type !== "log") y.range = [0, chart.top];
    return { xaxis: x, yaxis: y, yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true } };
  }

  function level(chart) {
    const ink = { color: colour("soft"), width: 1, dash: "dot" };
    return { type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.level, y1: chart.level, line: ink };
  }

  function layout(chart, plot) {
    return {
      shapes: chart.level === null ? [] : [level(chart)],
      ...axes(chart, plot),
      width: plot.clientWidth, height: plot.clientHeight, margin: { l: 44, r: 12, t: 10, b: 38 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("soft") },
      barmode: "stack", bargap: chart.traces[0].x.length <= 32 ? 0.25 : 0,
      showlegend: false, hovermode: isHeat(chart) ? "closest" : "x unified", hoverdistance: 16, dragmode: "zoom",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink"), size: 12 } },
    };
  }

  function render(plot) {
    if (!plot.clientWidth) return;  // the reader has hidden its run
    const chart = report.charts[plot.dataset.chart];
    const shown = chart.traces.filter((trace) => !hidden.has(trace.run));
    const traces = shown.flatMap((trace) => draw[trace.style](trace, chart));
    if (chart.kind === "curves" && !isHeat(chart)) traces.push(marks(new Set(shown.map((trace) => trace.run))));
    Plotly.react(plot, traces, layout(chart, plot), { displayModeBar: false, doubleClick: "reset" });
  }

  // Only charts on the screen, or nearly, are drawn at once, so a long page opens quickly; the others when they are scrolled to.
  const near = new Set();
  const all = () => near.forEach(render);
  const watcher = new IntersectionObserver((entries) => entries.filter((each) => each.isIntersecting).forEach(({ target }) => {
    if (!near.has(target)) { near.add(target); render(target); }
  }), { rootMargin: "400px" });
  let unfolded = [];
  const printing = (on) => () => {
    document.documentElement.classList.toggle("printing", on);
    if (on) unfolded = [...document.querySelectorAll("details:not([open])")];
    unfolded.forEach((each) => { each.open = on; });
    plots.forEach((each) => near.add(each));
    all();
  };

  document.querySelectorAll(".axis input").forEach((input) => input.addEventListener("change", () => {
    axis = input.value;
    all();
  }));
  document.querySelectorAll(".runs input").forEach((input) => input.addEventListener("change", () => {
    const run = Number(input.value);
    if (input.checked) hidden.delete(run); else hidden.add(run);
    document.querySelectorAll(`[data-run="${run}"]`).forEach((each) => { each.hidden = !input.checked; });
    all();
  }));
  document.querySelectorAll(".log input").forEach((input) => input.addEventListener("change", () => {
    if (input.checked) logarithmic.add(input.value); else logarithmic.delete(input.value);
    render(document.querySelector(`[data-chart="${input.value}"]`));
  }));
  // If the loss that is compared is far below the first one, a linear axis would press the curves onto its bottom.
  document.querySelectorAll(".log input").forEach((input) => {
    const chart = report.charts[input.value];
    input.checked = chart.level > 0 && Math.max(...chart.traces.map(largest)) > 10 * chart.level;
    if (input.checked) logarithmic.add(input.value);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  addEventListener("beforeprint", printing(true));
  addEventListener("afterprint", printing(false));
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; all(); } });
  plots.forEach((plot) => watcher.observe(plot));
})();
