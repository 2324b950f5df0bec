// Charts over steps or hours with all runs, drawn when they scroll into view.
"use strict";

(() => {
  const { make, byId, number } = report;
  const { about, labelOf, short, specs } = report.charts;
  const drawn = new Map(); // title -> {spec, box, plot}
  const hidden = new Set(); // "title|metric" switched off by a click on its legend
  const dashes = [undefined, [6, 4], [2, 3], [10, 4, 2, 4], [1, 5]];
  const fills = ["#9dc1e6", "#f2b48f", "#a5d8b4", "#cdb0e2", "#e8d28c", "#9fd6da"];
  const seen = new IntersectionObserver(inView, { rootMargin: "300px" });
  const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => fit(target)));

  const options = () => ({ axis: byId("axis").value, weight: Number(byId("smoothing").value) });
  // Dash pattern of a metric, as colours distinguish runs.
  function look(run, place) {
    if (report.runs.length === 1 || !run) return { colour: run ? report.colours[place % report.colours.length] : "#5a6672", dash: run ? undefined : dashes[place % dashes.length] };
    return { colour: run.colour, dash: dashes[place % dashes.length] };
  }

  const isShown = (spec, { run, name }) => run.shown && !hidden.has(`${spec.title}|${name}`);

  // One line of a chart: a metric of a run.
  function linesOf(spec) {
    const runs = spec.run ? [spec.run] : report.runs;
    return runs.flatMap((run) =>
      spec.metrics
        .filter((name) => run.columns.has(name))
        .map((name) => {
          const place = spec.metrics.indexOf(name);
          return {
            run, name, values: run.columns.get(name), errors: run.columns.get(`${name}_stderr`),
            ...look(run, place),
            label: [report.runs.length > 1 ? run.label : "", spec.metrics.length > 1 ? labelOf(spec, name) : ""].filter(Boolean).join(" · ") || short(name),
          };
        }),
    );
  }

  function joined(lines, axis) {
    const tables = lines.map(({ run, values, errors }) => {
      const xs = axis === "hours" ? run.hours : run.steps;
      return errors ? [xs, values, errors] : [xs, values];
    });
    if (!tables.length) return [[]];
    return uPlot.join(tables);
  }

  // Data and series of uPlot for the lines of a chart; ``errors``: for each series the column of its errors;
  // ``raw``: values shown at the cursor, null for none. (uPlot deep-copies series, so they hold no run.)
  function filled(spec) {
    const { axis, weight } = options();
    const lines = linesOf(spec);
    const columns = joined(lines, axis);
    const data = [columns[0]];
    const series = [{ label: axis }];
    const errors = [null];
    const raw = [null];
    let column = 1;
    for (const line of lines) {
      const values = columns[column++];
      const own = line.errors ? columns[column++] : null;
      const look = { label: line.label, stroke: line.colour, dash: line.dash, width: 1.6, spanGaps: true, show: isShown(spec, line), number: line.run.number, metric: line.name };
      const soft = weight > 0 && !own && values.filter((one) => one !== null && one !== undefined).length > 2;
      if (soft) {
        data.push(values);
        series.push({ ...look, label: `${line.label}, raw`, stroke: `${line.colour}40`, width: 1, points: { show: false } });
        errors.push(null);
        raw.push(null); // the smoothed series shows the value
      }
      data.push(soft ? report.smooth(values.map((one) => one ?? null), weight) : values);
      series.push(look);
      errors.push(own);
      raw.push(values);
    }
    return spec.kind === "stack" ? stacked(spec, columns, lines, axis) : { data, series, errors, raw };
  }

  // The sum of all stages is drawn first, the smaller sums over it.
  function stacked(spec, columns, lines, axis) {
    const sums = [];
    let below = columns[0].map(() => 0);
    lines.forEach((_, i) => {
      below = below.map((sum, row) => sum + (columns[i + 1][row] ?? 0));
      sums.push(below);
    });
    const known = columns[0].map((_, row) => lines.some((__, i) => columns[i + 1][row] !== null && columns[i + 1][row] !== undefined));
    const order = lines.map((_, i) => i).reverse();
    const series = order.map((i) => {
      const place = spec.metrics.indexOf(lines[i].name);
      const colours = { stroke: report.colours[place % report.colours.length], fill: fills[place % fills.length] };
      return { label: short(lines[i].name).replace(/_s$/, ""), show: true, ...colours, width: 1, points: { show: false } };
    });
    const data = order.map((i) => sums[i].map((sum, row) => (known[row] ? sum : null)));
    return { data: [columns[0], ...data], series: [{ label: axis }, ...series], errors: [], raw: [null, ...order.map((i) => columns[i + 1])] };
  }

  function drawErrors(plot, errors) {
    const context = plot.ctx;
    context.save();
    errors.forEach((own, i) => {
      if (!own || !plot.series[i].show) return;
      context.strokeStyle = plot.series[i]._stroke || plot.series[i].stroke(plot, i);
      context.lineWidth = 1.2 * devicePixelRatio;
      context.beginPath();
      own.forEach((error, row) => {
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
      item.errors.forEach((own, i) => {
        if (!own || !plot.series[i].show) return;
        own.forEach((error, row) => {
          const bar = report.interval(plot.data[i][row], error);
          if (!bar) return;
          low = Math.min(low, bar[0]);
          high = Math.max(high, bar[1]);
        });
      });
      if (item.spec.kind === "stack" || (item.spec.kind === "lines" && item.spec.unit === "share")) low = Math.min(0, low);
      const room = (high - low || Math.abs(high) || 1) * 0.06;
      return [low === 0 ? 0 : low - room, high + room];
    };
  }

  function plotFor(item) {
    const { spec, box } = item;
    const { data, series, errors, raw } = filled(spec);
    const hours = options().axis === "hours";
    const grid = { stroke: "#e8ebee", width: 1 };
    const look = { stroke: "#5a6672", grid, ticks: { ...grid, size: 4 }, font: "11px system-ui, sans-serif" };
    const wholeSteps = (plot, splits) => splits.map((at) => (hours || Number.isInteger(at) ? String(Number(at.toPrecision(6))) : ""));
    item.key = series.map(({ label }) => label).join("\n");
    Object.assign(item, { errors, raw });
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
      const item = drawn.get(target.dataset.title);
      if (!item) continue;
      item.visible = isIntersecting;
      if (isIntersecting && !item.plot) plotFor(item);
    }
  }

  function fit(box) {
    const item = drawn.get(box.parentElement?.dataset.title);
    if (item?.plot && box.clientWidth && Math.abs(item.plot.width - box.clientWidth) > 1) item.plot.setSize({ width: box.clientWidth, height: 190 });
  }

  // Shows all values of a chart at the cursor.
  function explain(plot, { errors, raw }) {
    if (!plot.over.matches(":hover")) return;
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) return report.showTip(null);
    const lines = [`${options().axis === "hours" ? "hours" : "step"} ${number(plot.data[0][idx], 5)}`];
    plot.series.forEach((series, i) => {
      const value = raw[i]?.[idx];
      if (!series.show || value === null || value === undefined) return;
      const error = errors[i]?.[idx];
      lines.push(`${series.label}: ${number(value)}${error ? `, 95%: ${report.interval(value, error).map((at) => number(at, 3)).join(" to ")}` : ""}`);
    });
    const box = plot.over.getBoundingClientRect();
    report.showTip(lines.join("\n"), box.left + left, box.top + top);
  }

  // Legend of the metrics of a chart; a click switches one off.
  function legend(spec) {
    const alone = report.runs.length === 1;
    if (spec.metrics.length === 1) return null;
    const entries = spec.metrics.map((name, place) => {
      const { colour, dash } = spec.run ? { colour: fills[place % fills.length] } : look(alone ? report.runs[0] : null, place);
      const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      line.setAttribute("viewBox", "0 0 22 8");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", "M0 4H22");
      path.setAttribute("stroke", colour);
      path.setAttribute("stroke-width", spec.run ? 8 : 2);
      if (dash) path.setAttribute("stroke-dasharray", dash.join(" "));
      line.append(path);
      if (spec.run) return make("span", {}, line, short(name).replace(/_s$/, ""));
      const button = make("button", {}, line, labelOf(spec, name));
      button.title = about(name);
      button.setAttribute("aria-pressed", String(!hidden.has(`${spec.title}|${name}`)));
      button.addEventListener("click", () => {
        const key = `${spec.title}|${name}`;
        if (!hidden.delete(key)) hidden.add(key);
        button.setAttribute("aria-pressed", String(!hidden.has(key)));
        report.showRuns();
      });
      return button;
    });
    return make("div", { classes: "legends" }, ...entries);
  }

  function element(spec) {
    const box = make("div");
    box.addEventListener("pointerleave", () => report.showTip(null));
    const what = spec.metrics.length === 1 && spec.metrics[0] !== spec.title ? spec.metrics[0] : "";
    const bars = spec.kind === "accuracy" ? "bars: 95%" : "";
    const heading = make("h4", { title: spec.metrics.map(about).join("\n\n") }, spec.title, make("small", { textContent: [spec.unit, bars, what].filter(Boolean).join(" · ") }));
    const chart = make("div", { classes: "chart" }, heading, box, legend(spec) ?? "");
    chart.dataset.title = spec.title;
    chart.dataset.metrics = spec.metrics.join(" ");
    drawn.set(spec.title, { spec, box });
    seen.observe(chart);
    resized.observe(box);
    return chart;
  }

  function build() {
    forget();
    const sections = specs().map(({ title, charts }) =>
      make("div", { classes: "section" }, make("h2", { textContent: title }), make("div", { classes: "charts" }, ...charts.map(element))),
    );
    byId("charts").replaceChildren(...(sections.length ? sections : [make("p", { classes: "said", textContent: "No metrics yet: no step has been logged." })]));
    report.built = signature();
    showNamed();
  }

  function forget() {
    for (const { plot } of drawn.values()) plot?.destroy();
    drawn.clear();
    seen.disconnect();
    resized.disconnect();
  }

  const signature = () => JSON.stringify(specs().map(({ charts }) => charts.map(({ title, metrics }) => [title, metrics])));

  function showNamed() {
    const wanted = byId("named").value.trim().toLowerCase();
    for (const section of document.querySelectorAll("#charts .section")) {
      const charts = [...section.querySelectorAll(".chart")];
      charts.forEach((chart) => (chart.hidden = !`${chart.dataset.title} ${chart.dataset.metrics}`.toLowerCase().includes(wanted)));
      section.hidden = charts.every((chart) => chart.hidden);
    }
  }

  // New data for the same charts; zoom and hidden metrics stay.
  function refresh(item) {
    const { data, series, errors, raw } = filled(item.spec);
    if (series.map(({ label }) => label).join("\n") !== item.key || series.length !== item.plot.series.length) {
      item.plot.destroy();
      item.plot = null;
      if (item.visible) plotFor(item);
      return;
    }
    const { min, max } = item.plot.scales.x;
    const old = item.plot.data[0];
    const zoomed = old.length > 1 && (min > old[0] || max < old[old.length - 1]);
    Object.assign(item, { errors, raw });
    item.plot.setData(data, !zoomed);
    if (zoomed) item.plot.setScale("x", { min, max });
  }

  report.updateCurves = () => {
    if (signature() !== report.built) build();
    else for (const item of drawn.values()) if (item.plot) refresh(item);
    const untimed = report.runs.some((run) => !run.clocked);
    byId("axis").options[1].textContent = untimed ? "hours of step time" : "hours since the start";
  };

  report.showRuns = () => {
    for (const item of drawn.values()) {
      item.plot?.series.forEach((series, i) => {
        if (!i || !series.metric) return;
        const show = isShown(item.spec, { run: report.runs[series.number], name: series.metric });
        if (series.show !== show) item.plot.setSeries(i, { show });
      });
      if (item.spec.run) item.box.parentElement.hidden = !item.spec.run.shown;
    }
  };

  report.startCurves = () => {
    byId("axis").addEventListener("change", redraw);
    byId("smoothing").addEventListener("input", () => {
      const { weight } = options();
      byId("smoothed").textContent = weight ? weight.toFixed(2) : "off";
      redraw();
    });
    byId("named").addEventListener("input", showNamed);
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
