// Which charts the metrics of all runs make, and the names on them.
"use strict";

(() => {
  const isWhole = (pattern) => new RegExp(`^(?:${pattern})$`);
  const short = (name) => name.replace(/^(?:eval|reward|rollout|policy|time|memory|throughput|outcome|mismatch|probe|correction|health|restarts|loss)\//, "");

  // Shortens the name unless that makes two metrics of the chart equal.
  const labelOf = ({ metrics }, name) => (metrics.filter((other) => short(other) === short(name)).length > 1 ? name : short(name));

  // The unit of a chart; "" without a common one, or when the title has it.
  function unitOf({ title, metrics }) {
    const units = new Set(metrics.map((name) => report.described(name).unit));
    const [unit] = units;
    return units.size > 1 || unit === "1" || title.split(/\W/).includes(unit) ? "" : unit;
  }

  // reward/mean (reward): meaning. Look for: healthy range
  function about(name) {
    const { unit, meaning, lookFor } = report.described(name);
    return [`${name}${unit ? ` (${unit})` : ""}`, meaning].filter(Boolean).join(": ") + (lookFor ? `\nLook for: ${lookFor}` : "");
  }

  // The charts that have data: [{title, charts: [{title, unit, kind, metrics}]}]
  function specs() {
    const names = new Set();
    for (const run of report.runs) for (const name of run.columns.keys()) names.add(name);
    const left = new Set([...names].filter((name) => !(name.endsWith("_stderr") && names.has(name.slice(0, -7)))));
    const sections = report.layout.map(({ title, charts }) => ({
      title,
      charts: charts.flatMap((chart) => {
        const tests = chart.metrics.map(isWhole);
        const metrics = tests.flatMap((test) => [...left].filter((name) => test.test(name)));
        metrics.forEach((name) => left.delete(name));
        if (!metrics.length) return [];
        if (chart.kind === "accuracy") return metrics.map((name) => ({ ...chart, title: short(name), metrics: [name] }));
        if (chart.kind === "stack") {
          const own = report.runs.filter((run) => metrics.some((name) => run.columns.has(name)));
          return own.map((run) => ({ ...chart, metrics, run, title: own.length > 1 ? `${chart.title}: ${run.label}` : chart.title }));
        }
        return [{ ...chart, metrics }];
      }),
    }));
    const others = [...left].sort().map((name) => ({ title: name, kind: "lines", metrics: [name] }));
    const all = [...sections, { title: "Other metrics", charts: others }].filter((section) => section.charts.length);
    for (const { charts } of all) for (const chart of charts) chart.unit = unitOf(chart);
    return all;
  }

  report.charts = { about, labelOf, short, specs };
})();
