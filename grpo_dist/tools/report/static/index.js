// All rollouts as columns; filters and sorts a hundred thousand at once.
"use strict";

(() => {
  const WORDS = ["kind", "uid", "source", "outcome", "finish", "problem", "expected", "found", "called", "ending", "failure"];
  const NUMBERS = ["run", "part", "step", "group", "sample", "reward", "length", "given", "turns", "calls", "advantage", "recorded"];
  const columns = {};
  const dictionaries = {}; // column of words -> {values, places}
  for (const name of [...WORDS, ...NUMBERS]) columns[name] = [];
  for (const name of WORDS) dictionaries[name] = { values: [], places: new Map() };
  const alive = []; // 0: the row's part was rewritten
  const parts = []; // [{run, entry, first, rows, data}]
  const current = new Map(); // "run/key" -> index in ``parts``

  function place(name, value) {
    const { values, places } = dictionaries[name];
    if (!places.has(value)) {
      places.set(value, values.length);
      values.push(value);
    }
    return places.get(value);
  }

  function append(run, entry, data) {
    const rows = data.sample.length;
    const number = parts.length;
    parts.push({ run, entry, first: alive.length, rows, rewards: data.parts });
    current.set(`${run.number}/${entry.key}`, number);
    const kind = place("kind", entry.kind);
    for (const name of WORDS) {
      if (name === "kind") continue;
      const places = data[name].values.map((value) => place(name, value));
      for (const index of data[name].index) columns[name].push(places[index]);
    }
    for (const name of ["group", "sample", "length", "given", "turns", "calls", "reward", "advantage"]) for (const value of data[name]) columns[name].push(value ?? NaN);
    for (let i = 0; i < rows; i++) {
      columns.run.push(run.number);
      columns.part.push(number);
      columns.step.push(entry.step);
      columns.kind.push(kind);
      columns.recorded.push(entry.recorded ? 1 : 0);
      alive.push(1);
    }
  }

  function forget(key) {
    const { first, rows } = parts[current.get(key)];
    alive.fill(0, first, first + rows);
    current.delete(key);
  }

  // Loads the new parts in the manifest of ``run``, newest first, and reports progress to ``tell``. Returns
  // true when anything changed.
  async function sync(run, tell) {
    const wanted = new Map(run.manifest.samples.map((entry) => [`${run.number}/${entry.key}`, entry]));
    let changed = false;
    for (const key of [...current.keys()]) {
      if (!key.startsWith(`${run.number}/`)) continue;
      const entry = wanted.get(key);
      const old = parts[current.get(key)];
      if (!entry || entry.version !== old.entry.version) {
        forget(key);
        changed = true;
      } else old.entry = entry;
    }
    const missing = [...wanted].filter(([key]) => !current.has(key)).sort(([, a], [, b]) => b.step - a.step);
    let reported = performance.now();
    for (let i = 0; i < missing.length; i += 8) {
      const some = missing.slice(i, i + 8).map(([, entry]) => entry);
      const found = await Promise.all(some.map((entry) => report.piece(run.number, `rows/${entry.key}`, entry.version).catch(() => null)));
      some.forEach((entry, j) => found[j] && append(run, entry, found[j]));
      if (performance.now() - reported > 400) {
        tell((i + some.length) / missing.length);
        reported = performance.now();
        await report.pause();
      }
    }
    return changed || missing.length > 0;
  }

  // Whether an episode whose calls had the outcomes ``value``, "ok, timeout" or "none", is ``wanted``: "any" is
  // one with a call.
  function calledAs(wanted, value) {
    if (value === null) return false;
    return wanted === "any" ? value !== "none" : value.split(", ").includes(wanted);
  }

  // Returns the rows that pass, in file order. ``wanted``: {runs: Set, kind, ..., stepMin, ...}, null for any;
  // ``texts``: rows found by a text search, null without one.
  function filter(wanted, texts) {
    const { run, step, reward, length, recorded } = columns;
    const words = ["kind", "source", "outcome", "finish"]
      .filter((name) => wanted[name] !== null)
      .map((name) => [columns[name], dictionaries[name].places.get(wanted[name]) ?? -1]);
    const bounds = [[step, wanted.stepMin, wanted.stepMax], [reward, wanted.rewardMin, wanted.rewardMax], [length, wanted.lengthMin, wanted.lengthMax]]
      .filter(([, low, high]) => low !== null || high !== null)
      .map(([column, low, high]) => [column, low ?? -Infinity, high ?? Infinity]);
    const called = wanted.called === null ? null : new Set(dictionaries.called.values.flatMap((value, i) => (calledAs(wanted.called, value) ? [i] : [])));
    const found = [];
    rows: for (let i = 0; i < alive.length; i++) {
      if (!alive[i] || !wanted.runs.has(run[i]) || (texts && !texts[i]) || (wanted.recorded && !recorded[i])) continue;
      if (wanted.scored !== null && wanted.scored === Number.isNaN(reward[i])) continue;
      if (called && !called.has(columns.called[i])) continue;
      for (const [column, value] of words) if (column[i] !== value) continue rows;
      for (const [column, low, high] of bounds) if (!(column[i] >= low && column[i] <= high)) continue rows;
      found.push(i);
    }
    return found;
  }

  // Sorts ``rows`` by a column, missing values last, ties by run, step and position.
  function sort(rows, name, descending) {
    const sign = descending ? -1 : 1;
    const { run, step } = columns;
    const keys = WORDS.includes(name) ? ranks(name) : null;
    const column = columns[name];
    const key = keys ? (i) => keys[column[i]] : (i) => column[i];
    return rows.sort((a, b) => {
      const x = key(a);
      const y = key(b);
      if (x !== y && !(Number.isNaN(x) && Number.isNaN(y))) return Number.isNaN(x) ? 1 : Number.isNaN(y) ? -1 : (x - y) * sign;
      return run[a] - run[b] || step[b] - step[a] || a - b;
    });
  }

  function ranks(name) {
    const { values } = dictionaries[name];
    const order = values.map((_, i) => i).sort((a, b) => compare(values[a], values[b]));
    const found = new Array(values.length);
    order.forEach((value, rank) => (found[value] = values[value] === null ? NaN : rank));
    return found;
  }

  const collator = new Intl.Collator("en", { numeric: true });
  const compare = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : collator.compare(a, b));

  const word = (name, row) => dictionaries[name].values[columns[name][row]];

  // Returns the rows of the group of ``row``.
  function groupOf(row) {
    const part = parts[columns.part[row]];
    const group = columns.group[row];
    const rows = [];
    for (let i = part.first; i < part.first + part.rows; i++) if (columns.group[i] === group) rows.push(i);
    return { part, group, rows };
  }

  report.index = { columns, dictionaries, parts, alive, sync, filter, sort, word, groupOf, total: () => alive.reduce((sum, one) => sum + one, 0) };
})();
