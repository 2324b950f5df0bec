// Summary line of each run, settings and environment side by side, events, ledger.
"use strict";

(() => {
  const { make, byId, cell, table, number } = report;

  const dot = (run) => {
    const mark = make("span", { classes: "dot" });
    mark.style.background = run.colour;
    return mark;
  };

  const when = (seconds) => (seconds === null ? "–" : new Date(seconds * 1000).toLocaleString("sv-SE"));

  function accuracy(run) {
    const names = [...run.columns.keys()].filter((name) => /^eval\/.+@\d+$/.test(name) && run.columns.has(`${name}_stderr`));
    const seen = new Set();
    const first = names.filter((name) => {
      const set = name.split("/")[1];
      return !seen.has(set) && seen.add(set);
    });
    const share = (value) => (value === null ? "–" : `${(100 * value).toFixed(1)}%`);
    return first.map((name) => `${name.slice(5)}: ${share(report.first(run, name))} → ${share(report.last(run, name))}`).join("\n") || "–";
  }

  const outcomes = { trained: "trained", no_signal: "zero-variance", unscored: "unscored", put_aside: "discarded by dynamic sampling", skipped: "skipped" };

  // Number of unscored samples over all steps.
  function unscored(run) {
    const counts = run.columns.get("reward/unscored") || [];
    return counts.reduce((sum, count) => sum + (count ?? 0), 0).toLocaleString("en");
  }

  function summaryRow(run) {
    const { about } = run.manifest;
    const wanted = about.config.steps;
    const done = run.steps.length ? run.steps[run.steps.length - 1] : 0;
    const ledger = Object.entries(about.ledger).map(([name, count]) => `${count.toLocaleString("en")} ${outcomes[name] || name}`).join(", ");
    const hours = run.hours.length ? run.hours[run.hours.length - 1] : 0;
    return make(
      "tr", {}, cell(make("span", {}, dot(run), ` ${run.label}`), "nowrap"), cell(about.preset ?? "–", "lines"), cell(`${done}${wanted ? ` of ${wanted}` : ""}${about.done ? ", done" : ""}`, "nowrap"),
      cell(hours < 1 ? `${(hours * 60).toFixed(1)} min` : `${hours.toFixed(2)} h`, "number"), cell(number(report.first(run, "reward/mean")), "number"),
      cell(number(report.last(run, "reward/mean")), "number"), cell(accuracy(run), "lines"), cell(ledger || "–", "nowrap"), cell(unscored(run), "number"), cell(String(run.events.length), "number"),
    );
  }

  function notices() {
    const notices = [];
    for (const run of report.runs) {
      const runNotices = [...run.manifest.about.notices];
      const left = run.manifest.about.left_out;
      if (left.rollouts || left.tables) runNotices.push(`rollouts: the newest are shown; ${left.rollouts.toLocaleString("en")}, and all rollouts of ${left.tables} older table(s), are left out (--rollouts)`);
      if (run.manifest.about.rows_dropped) runNotices.push(`${run.manifest.about.rows_dropped} row(s) of the training data became no prompts (dropped.jsonl)`);
      notices.push(...runNotices.map((text) => (report.runs.length > 1 ? `${run.label}: ${text}` : text)));
    }
    return notices.length ? make("ul", { classes: "notices" }, ...notices.map((text) => make("li", { textContent: text }))) : null;
  }

  function summary() {
    const headings = ["run", "preset", "steps", "#time", "#reward first", "#reward last", "accuracy first → last", "prompts", "#not scored", "#events"];
    byId("summary").replaceChildren(...[table(headings, report.runs.map(summaryRow)), notices()].filter(Boolean));
  }

  function compared(kind, sortKeys) {
    const keys = [...new Set(report.runs.flatMap((run) => Object.keys(run.manifest.about[kind])))];
    if (sortKeys) keys.sort();
    const wanted = byId("setting-named").value.trim().toLowerCase();
    const rows = keys.flatMap((key) => {
      const values = report.runs.map((run) => run.manifest.about[kind][key] ?? null);
      const differs = values.some((value) => value !== values[0]);
      if ((byId("differences").checked && !(many() ? differs : isChanged(kind, key))) || !`${key} ${values.join(" ")}`.toLowerCase().includes(wanted)) return [];
      return [make("tr", { classes: differs ? "differs" : "" }, cell(key, "key"), ...values.map((value) => cell(value ?? "–")))];
    });
    const empty = keys.length ? (byId("differences").checked && !wanted ? (many() ? "Nothing differs." : "Nothing is changed.") : "Nothing has that name.") : "Nothing is recorded.";
    return rows.length ? table(["key", ...report.runs.map(({ label }) => label)], rows) : make("p", { classes: "said", textContent: empty });
  }

  const many = () => report.runs.length > 1;

  // Whether a single run's setting differs from its default.
  const isChanged = (kind, key) => kind !== "config" || report.runs[0].manifest.about.changed.includes(key);

  function settings() {
    byId("settings-table").replaceChildren(compared("config", false));
    byId("environment-table").replaceChildren(compared("environment", false));
  }

  function events() {
    const rows = report.runs
      .filter((run) => run.shown)
      .flatMap((run) => run.events.map(([time, step, message]) => ({ run, time, step, message })))
      .sort((a, b) => (b.time ?? 0) - (a.time ?? 0));
    const many = report.runs.length > 1;
    const lines = rows.map(({ run, time, step, message }) =>
      make("tr", {}, many ? cell(make("span", {}, dot(run), ` ${run.label}`), "nowrap") : null, cell(when(time), "nowrap"), cell(step === null ? "–" : String(step), "number"), cell(report.visible(message), "message")),
    );
    const quarantined = report.runs.flatMap((run) => run.manifest.samples.filter(({ kind }) => kind === "quarantine").map(({ step }) => `${many ? `${run.label} ` : ""}step ${step}`));
    const headings = [...(many ? ["run"] : []), "time", "#step", "what"];
    byId("events-list").replaceChildren(
      ...(quarantined.length ? [make("p", { textContent: `Quarantined batches, in Rollouts under the set “quarantine”: ${[...new Set(quarantined)].join(", ")}` })] : []),
      lines.length ? table(headings, lines) : make("p", { classes: "said", textContent: "No warning and no health event is recorded." }),
    );
  }

  report.updateAbout = () => {
    summary();
    settings();
    events();
  };

  report.updateEvents = events;

  report.startAbout = () => {
    byId("differences-text").textContent = many() ? "only differences between runs" : "only changed settings";
    byId("differences").checked = true;
    byId("differences").addEventListener("change", settings);
    byId("setting-named").addEventListener("input", settings);
  };
})();
