// Metrics of each run as columns over its steps, and the end of each step.
"use strict";

(() => {
  // ``run.pieces[kind]``: [{version, data}], aligned with the manifest. Returns true when anything is new.
  async function fetchParts(run, kind, versions) {
    const known = run.pieces[kind] || [];
    let changed = known.length !== versions.length;
    const parts = await Promise.all(
      versions.map(async (version, i) => {
        if (known[i] && known[i].version === version) return known[i];
        changed = true;
        return { version, data: await report.piece(run.number, `${kind}/${i}`, version) };
      }),
    );
    run.pieces[kind] = parts;
    return changed;
  }

  function merged(run) {
    const rows = new Map(); // step -> [part, row]: a later line of a step replaces an earlier one
    run.pieces.metrics.forEach(({ data }) => data.step.forEach((step, i) => rows.set(step, [data, i])));
    const steps = [...rows.keys()].sort((a, b) => a - b);
    const names = new Set(run.pieces.metrics.flatMap(({ data }) => Object.keys(data.columns)));
    const columns = new Map();
    for (const name of names) {
      const values = steps.map((step) => {
        const [data, i] = rows.get(step);
        return data.columns[name]?.[i] ?? null;
      });
      columns.set(name, values);
    }
    run.steps = steps;
    run.columns = columns;
    run.hours = hours(run);
  }

  // Hours from the launch of the run to the end of each step; without a timeline, the sum of step times.
  function hours(run) {
    const ends = new Map();
    const launched = Date.parse(run.manifest.about.environment.first_started ?? run.manifest.about.environment.started) / 1000;
    let start = Infinity;
    for (const { data } of run.pieces.clock) {
      data.step.forEach((step, i) => {
        ends.set(step, data.end[i]);
        start = Math.min(start, data.begin[i]);
      });
    }
    run.clocked = ends.size > 0;
    if (launched < start) start = launched; // the time before the first step: workers and models load
    const seconds = run.columns.get("time/step_s") || [];
    let last = 0;
    return run.steps.map((step, i) => {
      last = ends.has(step) ? Math.max(last, (ends.get(step) - start) / 3600) : last + (seconds[i] || 0) / 3600;
      return last;
    });
  }

  report.loadSeries = async (run) => {
    const kinds = ["metrics", "clock", "events"];
    const changed = await Promise.all(kinds.map((kind) => fetchParts(run, kind, run.manifest[kind])));
    if (changed[0] || changed[1] || !run.columns) merged(run);
    run.events = run.pieces.events.flatMap(({ data }) => data);
    return changed.some(Boolean);
  };

  // Wilson's 95% interval of a share for the number of independent answers that would have this standard
  // error (as grpo_dist/evaluation/estimates.py); null without one. An error of 0 gives no such number.
  report.interval = (share, error) => {
    if (share === null || share === undefined || error === null || error === undefined) return null;
    const count = (share * (1 - share)) / error ** 2;
    if (!(count > 0 && count < Infinity)) return [share, share];
    const width = 1.959964 ** 2 / Math.max(1, count);
    const centre = (share + width / 2) / (1 + width);
    const half = Math.sqrt(width * share * (1 - share) + width ** 2 / 4) / (1 + width);
    return [Math.max(0, centre - half), Math.min(1, centre + half)];
  };

  report.last = (run, name) => {
    const values = run.columns.get(name) || [];
    for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
    return null;
  };

  report.first = (run, name) => (run.columns.get(name) || []).find((value) => value !== null) ?? null;
})();
