// One chart for each metric over steps or hours, with a line for each run, drawn when it scrolls into view.
"use strict";

(() => {
  const { make, byId, number, described } = report;
  const drawn = new Map(); // metric -> {name, unit, box, plot}
  const seen = new IntersectionObserver(inView, { rootMargin: "300px" });
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => fit(target)));

  const byHours = () => byId("axis").value === "hours";

  // eval/add3/pass@1 has error bars where eval/add3/pass@1_stderr is logged.
  const isError = (name, names) => name.endsWith("_stderr") && names.has(name.slice(0, -7));

  // The metrics by namespace, in the order of the catalogue: [["reward", ["reward/mean", ...]], ...]
  function sections() {
    const names = new Set(report.runs.flatMap((run) => [...run.columns.keys()]));
    const found = new Map();
    for (const name of [...names].sort((a, b) => report.rank(a) - report.rank(b) || (a < b ? -1 : 1))) {
      if (isError(name, names)) continue;
      const namespace = name.split("/")[0];
      if (!found.has(namespace)) found.set(namespace, []);
      found.get(namespace).push(name);
    }
    return [...found];
  }

  // reward/mean (reward): meaning. Look for: healthy range
  function about(name) {
    const { unit, meaning, lookFor } = described(name);
    return [`${name}${unit ? ` (${unit})` : ""}`, meaning].filter(Boolean).join(": ") + (lookFor ? `\nLook for: ${lookFor}` : "");
  }

  // Data and series of uPlot; ``errors``: for each series the column of its errors. (uPlot deep-copies series,
  // so they hold no run.)
  function filled({ name }) {
    const lines = report.runs.filter((run) => run.columns.has(name));
    const tables = lines.map((run) => {
      const errors = run.columns.get(`${name}_stderr`);
      return [byHours() ? run.hours : run.steps, run.columns.get(name), ...(errors ? [errors] : [])];
    });
    const columns = uPlot.join(tables);
    const [data, series, errors] = [[columns[0]], [{ label: byId("axis").value }], [null]];
    let column = 1;
    lines.forEach((run, i) => {
      data.push(columns[column++]);
      errors.push(tables[i].length > 2 ? columns[column++] : null);
      series.push({ label: report.runs.length > 1 ? run.label : name, stroke: run.colour, width: 1.6, spanGaps: true, points: { fill: report.colour("page") }, show: run.shown, number: run.number });
    });
    return { data, series, errors };
  }

  function drawErrors(plot, errors) {
    const context = plot.ctx;
    context.save();
    errors.forEach((column, i) => {
      if (!column || !plot.series[i].show) return;
      context.strokeStyle = plot.series[i]._stroke || plot.series[i].stroke(plot, i);
      context.lineWidth = 1.2 * devicePixelRatio;
      context.beginPath();
      column.forEach((error, row) => {
        const bar = report.interval(plot.data[i][row], error);
        if (!bar) return;
        const x = plot.valToPos(plot.data[0][row], "x", true);
        if (x < plot.bbox.left - 1 || x > plot.bbox.left + plot.bbox.width + 1) return;
        const [low, high] = bar.map((at) => plot.valToPos(at, "y", true));
        const half = 3 * devicePixelRatio;
        context.moveTo(x, low);
        context.lineTo(x, high);
        for (const y of [low, high]) {
          context.moveTo(x - half, y);
          context.lineTo(x + half, y);
        }
      });
      context.stroke();
    });
    context.restore();
  }

  function range(item) {
    return (plot, low, high) => {
      if (low === null || high === null) return [0, 1];
      item.errors.forEach((column, i) => {
        if (!column || !plot.series[i].show) return;
        column.forEach((error, row) => {
          const bar = report.interval(plot.data[i][row], error);
          if (!bar) return;
          low = Math.min(low, bar[0]);
          high = Math.max(high, bar[1]);
        });
      });
      if (item.unit === "share") low = Math.min(0, low);
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [low === 0 ? 0 : low - room, high + room];
    };
  }

  function plotFor(item) {
    const { box } = item;
    const { data, series, errors } = filled(item);
    const hours = byHours();
    const grid = { stroke: report.colour("rule"), width: 1 };
    const look = { stroke: report.colour("quiet"), grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
    const wholeSteps = (plot, splits) => splits.map((at) => (hours || Number.isInteger(at) ? String(Number(at.toPrecision(6))) : ""));
    item.key = series.map(({ label }) => label).join("\n");
    item.errors = errors;
    item.plot = new uPlot(
      {
        width: Math.max(120, box.clientWidth), height: 190, series, legend: { show: false },
        scales: { x: { time: false, range: (plot, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: { range: range(item) } },
        cursor: { sync: { key: "curves", setSeries: false }, points: { size: 6 } },
        axes: [
          { ...look, size: 24, gap: 3, values: wholeSteps },
          { ...look, size: (plot, labels) => Math.max(40, 14 + 6.6 * Math.max(0, ...(labels || []).map(({ length }) => length))), gap: 4, values: ticks },
        ],
        hooks: { draw: [(plot) => drawErrors(plot, item.errors)], setCursor: [(plot) => explain(plot, item)] },
      },
      data,
      box,
    );
  }

  // Labels with enough digits to differ.
  function ticks(plot, splits, axis, space, step) {
    const most = Math.max(...splits.map(Math.abs));
    const [, fraction = "", power] = Number(step.toPrecision(6)).toExponential().match(/^\d(?:\.(\d+))?e(.+)$/);
    const decimals = Math.max(0, fraction.length - Number(power));
    if (most >= 1e6 || decimals > 6) {
      const digits = Math.max(0, Math.floor(Math.log10(most)) + decimals);
      return splits.map((at) => (at === 0 ? "0" : at.toExponential(Math.min(digits, 8)).replace(/\.?0+e/, "e").replace("e+", "e")));
    }
    return splits.map((at) => at.toLocaleString("en", { maximumFractionDigits: decimals }));
  }

  function inView(entries) {
    for (const { target, isIntersecting } of entries) {
      const item = drawn.get(target.dataset.metric);
      if (!item) continue;
      item.visible = isIntersecting;
      if (isIntersecting && !item.plot) plotFor(item);
    }
  }

  function fit(box) {
    const item = drawn.get(box.parentElement?.dataset.metric);
    if (item?.plot && box.clientWidth && Math.abs(item.plot.width - box.clientWidth) > 1) item.plot.setSize({ width: box.clientWidth, height: 190 });
  }

  // Shows all values of a chart at the cursor.
  function explain(plot, { errors }) {
    if (!plot.over.matches(":hover")) return;
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) return report.showTip(null);
    const lines = [`${byHours() ? "hours" : "step"} ${number(plot.data[0][idx], 5)}`];
    plot.series.forEach((series, i) => {
      const value = plot.data[i][idx];
      if (!i || !series.show || value === null || value === undefined) return;
      const error = errors[i]?.[idx];
      lines.push(`${series.label}: ${number(value)}${error ? `, 95%: ${report.interval(value, error).map((at) => number(at, 3)).join(" to ")}` : ""}`);
    });
    const box = plot.over.getBoundingClientRect();
    report.showTip(lines.join("\n"), box.left + left, box.top + top);
  }

  function element(name) {
    const box = make("div");
    box.addEventListener("pointerleave", () => report.showTip(null));
    const { unit } = described(name);
    const bars = report.runs.some((run) => run.columns.has(`${name}_stderr`)) ? "bars: 95%" : "";
    const small = make("small", { textContent: [unit === "1" ? "" : unit, bars].filter(Boolean).join(" · ") });
    const chart = make("div", { classes: "chart" }, make("h4", { title: about(name) }, name, small), box);
    chart.dataset.metric = name;
    drawn.set(name, { name, unit, box });
    seen.observe(chart);
    resized.observe(box);
    return chart;
  }

  function build() {
    forget();
    const charts = sections().map(([title, names]) =>
      make("div", { classes: "section" }, make("h2", { textContent: title }), make("div", { classes: "charts" }, ...names.map(element))),
    );
    byId("charts").replaceChildren(...(charts.length ? charts : [make("p", { classes: "said", textContent: "No metrics yet: no step has been logged." })]));
    report.built = signature();
  }

  function forget() {
    for (const { plot } of drawn.values()) plot?.destroy();
    drawn.clear();
    seen.disconnect();
    resized.disconnect();
  }

  const signature = () => JSON.stringify(sections());

  // Whether a metric has several values, all of them equal, or none; never what a run is for.
  function isFlat(name) {
    if (name === "reward/mean" || name.startsWith("eval/")) return false;
    const values = report.runs.flatMap((run) => (run.columns.get(name) || []).filter((value) => value !== null));
    return values.length !== 1 && values.every((value) => value === values[0]);
  }

  // Shows the charts with the wanted name; without one, flat charts only where they are switched on.
  function showNamed() {
    const wanted = byId("named").value.trim().toLowerCase();
    const flat = new Set([...drawn.keys()].filter(isFlat));
    byId("flat-label").hidden = flat.size === 0;
    byId("flat-count").textContent = `${flat.size} flat charts`;
    const shows = (name) => name.toLowerCase().includes(wanted) && (wanted || byId("flat").checked || !flat.has(name));
    for (const section of document.querySelectorAll("#charts .section")) {
      const charts = [...section.querySelectorAll(".chart")];
      charts.forEach((chart) => (chart.hidden = !shows(chart.dataset.metric)));
      section.hidden = charts.every((chart) => chart.hidden);
    }
  }

  // Updates the charts' data and keeps the zoom.
  function refresh(item) {
    const { data, series, errors } = filled(item);
    if (series.map(({ label }) => label).join("\n") !== item.key || series.length !== item.plot.series.length) {
      item.plot.destroy();
      item.plot = null;
      if (item.visible) plotFor(item);
      return;
    }
    const { min, max } = item.plot.scales.x;
    const old = item.plot.data[0];
    const zoomed = old.length > 1 && (min > old[0] || max < old[old.length - 1]);
    item.errors = errors;
    item.plot.setData(data, !zoomed);
    if (zoomed) item.plot.setScale("x", { min, max });
  }

  report.updateCurves = () => {
    if (signature() !== report.built) build();
    else for (const item of drawn.values()) if (item.plot) refresh(item);
    showNamed();
    const untimed = report.runs.some((run) => !run.clocked);
    byId("axis").options[1].textContent = untimed ? "hours of step time" : "hours since the start";
  };

  report.showRuns = () => {
    for (const item of drawn.values()) {
      item.plot?.series.forEach((series, i) => {
        if (i && series.show !== report.runs[series.number].shown) item.plot.setSeries(i, { show: report.runs[series.number].shown });
      });
    }
  };

  report.startCurves = () => {
    byId("axis").addEventListener("change", redraw);
    byId("named").addEventListener("input", showNamed);
    byId("flat").addEventListener("change", showNamed);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  };

  function redraw() {
    for (const item of drawn.values()) {
      if (!item.plot) continue;
      item.plot.destroy();
      item.plot = null;
      if (item.visible) plotFor(item);
    }
  }
})();
