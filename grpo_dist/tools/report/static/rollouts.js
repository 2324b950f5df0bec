// The table of rollouts: filters, text search, and pages of rows.
"use strict";

(() => {
  const { make, byId, index } = report;
  const KEPT = 400_000; // characters of text kept in memory, in thousands
  const texts = new Map(); // "run/key/version" -> texts of a part
  let kept = 0;
  let table = null;
  let rows = []; // rows that pass the filters, sorted
  let order = { field: "step", dir: "desc" };
  let search = { text: "", found: null, parts: 0 };
  let turn = 0;

  const LIMITS = ["step", "reward", "length"];
  const asNumber = (id) => (byId(id).value === "" ? null : Number(byId(id).value));

  function wanted() {
    const shown = report.runs.filter((run) => run.shown).map(({ number }) => number);
    const one = byId("f-run").value;
    const found = { runs: new Set(one === "" ? shown : [Number(one)]) };
    found.recorded = byId("f-recorded").value !== "";
    found.called = byId("f-called").value || null;
    found.scored = { yes: true, no: false }[byId("f-scored").value] ?? null;
    for (const name of ["kind", "source", "outcome", "finish"]) found[name] = byId(`f-${name}`).value || null;
    for (const name of LIMITS) {
      found[`${name}Min`] = asNumber(`f-${name}-min`);
      found[`${name}Max`] = asNumber(`f-${name}-max`);
    }
    return found;
  }

  // All texts of an episode.
  const saidIn = (turns) => (turns ?? []).flatMap((turn) => [turn.text, turn.observation, ...turn.calls.flatMap((call) => [call.arguments, call.result])]);

  // Loads the texts of a part; drops the least recently used ones over the limit.
  report.textsOf = async (part) => {
    const name = `${part.run.number}/${part.entry.key}/${part.entry.version}`;
    let found = texts.get(name);
    if (!found) {
      found = await report.piece(part.run.number, `texts/${part.entry.key}`, part.entry.version);
      found.size = [...found.completion, ...found.problem, ...found.turns.flatMap(saidIn)].reduce((sum, text) => sum + text.length, 0) / 1e3;
      kept += found.size;
    }
    texts.delete(name);
    texts.set(name, found);
    for (const [old, { size }] of texts) {
      if (kept <= KEPT || old === name) break;
      texts.delete(old);
      kept -= size;
    }
    return found;
  };

  const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

  // Marks the rows whose text has the words; searches only parts that are new since the last search.
  // Reports partial results to ``tell``.
  async function find(text, mine, tell) {
    const same = search.text === text && search.found;
    const found = same ? search.found : [];
    const test = new RegExp(escaped(text), "i");
    let rested = performance.now();
    let reported = rested;
    const first = same ? search.parts : 0;
    for (let number = first; number < index.parts.length; number++) {
      const part = index.parts[number];
      if (!index.alive[part.first]) continue;
      const partTexts = await report.textsOf(part).catch(() => null);
      if (mine !== turn) return false;
      if (partTexts) mark(found, part, partTexts, test);
      if (performance.now() - rested > 40) {
        byId("searching").textContent = `searching … ${Math.round((100 * (number + 1)) / index.parts.length)}%`;
        await report.pause();
        if (mine !== turn) return false;
        rested = performance.now();
        if (rested - reported > 500) {
          await tell(found);
          reported = performance.now();
        }
      }
    }
    search = { text, found, parts: index.parts.length };
    byId("searching").textContent = "";
    return true;
  }

  function mark(found, part, partTexts, test) {
    const groups = partTexts.problem.map((problem, i) => test.test(problem) || test.test(partTexts.answer[i]));
    for (let i = 0; i < part.rows; i++) {
      const row = part.first + i;
      if (groups[index.columns.group[row]] || test.test(partTexts.completion[i]) || test.test(index.word("uid", row) || "") || saidIn(partTexts.turns[i]).some((text) => test.test(text))) found[row] = 1;
    }
  }

  // Refills the table; ``keepPage`` stays on the current page.
  async function update(keepPage) {
    const mine = ++turn;
    const text = byId("f-text").value;
    if (text) {
      if (!(await find(text, mine, (found) => show(found, keepPage)))) return;
    } else {
      search = { text: "", found: null, parts: 0 };
      byId("searching").textContent = "";
    }
    await show(search.found, keepPage);
  }

  async function show(found, keepPage) {
    rows = index.sort(index.filter(wanted(), found), order.field, order.dir === "desc");
    byId("count").textContent = `${rows.length.toLocaleString("en")} of ${index.total().toLocaleString("en")} rollouts`;
    if (!table) return;
    const page = keepPage ? Math.min(table.getPage() || 1, Math.max(1, Math.ceil(rows.length / table.getPageSize()))) : 1;
    await table.setPage(page);
  }

  function page({ page: number, size, sort }) {
    const asked = sort?.[0];
    if (asked && (asked.field !== order.field || asked.dir !== order.dir)) {
      order = { field: asked.field, dir: asked.dir };
      rows = index.sort(rows, order.field, order.dir === "desc");
    }
    const shown = rows.slice((number - 1) * size, number * size);
    return { data: shown.map(record), last_page: Math.max(1, Math.ceil(rows.length / size)), last_row: rows.length };
  }

  function record(row) {
    const { columns, word } = index;
    const found = { id: row, run: report.runs[columns.run[row]].label };
    for (const name of ["step", "sample", "reward", "length", "advantage", "turns", "calls"]) found[name] = Number.isNaN(columns[name][row]) ? null : columns[name][row];
    for (const name of ["kind", "source", "outcome", "finish", "problem", "expected", "found", "ending", "failure"]) found[name] = word(name, row);
    found.parts = partsOf(row);
    return found;
  }

  // "math 1 · format 0.25"; "" if there is only a total.
  function partsOf(row) {
    const { first, rewards } = index.parts[index.columns.part[row]];
    const known = Object.entries(rewards).filter(([, values]) => values[row - first] !== null || Number.isNaN(index.columns.reward[row]));
    return known.length > 1 ? known.map(([name, values]) => `${name} ${report.score(values[row - first])}`).join(" · ") : "";
  }

  function score(cell) {
    const { failure } = cell.getData();
    const scored = cell.getValue() !== null;
    return make("span", { textContent: report.score(cell.getValue()), title: scored ? "" : failure, classes: scored ? "" : "badge error" });
  }

  const number = (cell) => report.number(cell.getValue());
  const text = (cell) => make("span", { textContent: report.visible(cell.getValue() ?? "–") });

  function columns() {
    const right = { hozAlign: "right", headerHozAlign: "right", formatter: number };
    return [
      { title: "run", field: "run", formatter: text, width: 120, visible: report.runs.length > 1 },
      { title: "step", field: "step", ...right, width: 78 },
      { title: "set", field: "kind", formatter: text, width: 92 },
      { title: "source", field: "source", formatter: text, width: 92 },
      { title: "problem", field: "problem", formatter: text, widthGrow: 3, minWidth: 140 },
      { title: "completion", field: "ending", formatter: text, headerSort: false, widthGrow: 3, minWidth: 150 },
      { title: "sample", field: "sample", ...right, width: 94 },
      { title: "outcome", field: "outcome", formatter: (cell) => (cell.getValue() ? report.badge(cell.getValue()) : "–"), width: 104 },
      { title: "reward", field: "reward", ...right, formatter: score, width: 94 },
      { title: "parts", field: "parts", formatter: text, headerSort: false, width: 150, visible: hasParts() },
      { title: "advantage", field: "advantage", ...right, width: 116 },
      { title: "length", field: "length", ...right, width: 92 },
      { title: "turns", field: "turns", ...right, width: 82, visible: hasEpisodes() },
      { title: "calls", field: "calls", ...right, width: 80, visible: hasEpisodes() },
      { title: "finish", field: "finish", formatter: text, width: 84 },
      { title: "found", field: "found", formatter: text, widthGrow: 1, minWidth: 90 },
      { title: "expected", field: "expected", formatter: text, widthGrow: 1, minWidth: 108 },
    ];
  }

  function start() {
    table = new Tabulator("#table", {
      height: Math.max(320, Math.min(640, innerHeight - 330)),
      layout: "fitColumns", columns: columns(), columnHeaderSortMulti: false, initialSort: [{ column: "step", dir: "desc" }],
      pagination: true, paginationMode: "remote", paginationSize: 100, paginationSizeSelector: [50, 100, 500], paginationCounter: "rows",
      sortMode: "remote", ajaxURL: "rows", ajaxRequestFunc: async (url, config, asked) => page(asked), placeholder: "No rollout passes the filters.",
      dataLoader: false,
    });
    table.on("rowClick", (event, row) => report.openGroup(row.getData().id));
    return new Promise((built) => table.on("tableBuilt", built));
  }

  const hasParts = () => index.parts.some(({ rewards }) => Object.keys(rewards).length > 1);

  const hasEpisodes = () => index.dictionaries.called.values.some((value) => value !== null);

  // The choices of tool calls: with any, without, and each outcome.
  function offerCalls() {
    const outcomes = new Set(index.dictionaries.called.values.flatMap((value) => (value === null || value === "none" ? [] : value.split(", "))));
    report.choices(byId("f-called"), [["any", "with a call"], ["none", "without a call"], ...[...outcomes].sort().map((one) => [one, `a call: ${one}`])], "all");
    byId("f-called").parentElement.hidden = !hasEpisodes();
    if (table?.initialized && hasParts()) table.showColumn("parts");
    if (table?.initialized && hasEpisodes()) for (const name of ["turns", "calls"]) table.showColumn(name);
  }

  const named = (name) => index.dictionaries[name].values.filter((value) => value).map((value) => [value, value]);

  function offer() {
    report.choices(byId("f-run"), report.runs.map(({ number: of, label }) => [String(of), label]), "all shown");
    byId("f-run").parentElement.hidden = report.runs.length < 2;
    for (const name of ["kind", "source", "outcome", "finish"]) report.choices(byId(`f-${name}`), named(name), "all");
    offerCalls();
  }

  // Loads new rollouts of every run; filters, page and order stay.
  report.updateRollouts = async () => {
    let changed = false;
    for (const run of report.runs) {
      const tell = (share) => {
        offer();
        byId("searching").textContent = `loading rollouts … ${Math.round(share * 100)}%`;
        if (!byId("f-text").value) update(true);
      };
      changed = (await index.sync(run, tell)) || changed;
    }
    offer();
    byId("searching").textContent = "";
    if (changed || !rows.length) await update(true);
  };

  report.refilter = () => update(false);

  // Called when the tab opens: a table that was filled while hidden has drawn nothing.
  report.openRollouts = async () => {
    if (table?.initialized) return table.redraw(true);
    if (table) return;
    await start();
    await update(true);
  };

  // The first row of the previous or next group in the order of the table.
  report.neighbour = (row, by) => {
    const { part, group } = index.columns;
    const same = (a, b) => part[a] === part[b] && group[a] === group[b];
    let at = rows.findIndex((one) => same(one, row));
    while (at >= 0 && at < rows.length && same(rows[at], row)) at += by;
    return rows[at] ?? null;
  };

  // Prefetches texts while the page is idle, up to the limit.
  async function prepare() {
    for (let i = 0; i < index.parts.length && kept < KEPT * 0.8; i++) {
      await new Promise((idle) => (window.requestIdleCallback ? requestIdleCallback(idle, { timeout: 2000 }) : setTimeout(idle, 50)));
      if (index.alive[index.parts[i].first]) await report.textsOf(index.parts[i]).catch(() => null);
    }
  }

  report.startRollouts = () => {
    const soon = report.settled(() => update(false), 200);
    for (const input of byId("filters").querySelectorAll("input")) input.addEventListener("input", soon);
    for (const select of byId("filters").querySelectorAll("select")) select.addEventListener("change", () => update(false));
    byId("f-clear").addEventListener("click", () => {
      for (const input of byId("filters").querySelectorAll("input, select")) input.value = "";
      update(false);
    });
    if (!report.live) setTimeout(prepare, 500);
  };
})();
