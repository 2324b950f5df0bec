// One prompt with all its completions, side by side.
"use strict";

(() => {
  const { make, byId, index } = report;
  let open = null; // {row, part, rows, texts, tokens, why}
  let turn = 0;

  async function tokensOf(part, rows) {
    const { run, entry } = part;
    if (!run.manifest.has_tokens) return [null, `No colours: ${run.manifest.about.tokenizer}.`];
    if (!report.live && !entry.tokens) {
      const kept = (run.manifest.about.token_limit || 0).toLocaleString("en");
      return [null, `No colours: this page has the values of ${kept} tokens of this run (--token-values; --serve has all).`];
    }
    const data = await report.piece(run.number, `tokens/${entry.key}`, entry.version).catch((error) => ({ error }));
    if (data.error) return [null, `No colours: ${data.error.message}.`];
    if (rows.some((row) => row - part.first >= data.tokens.length)) return [null, "No colours: only the first groups of this step fit into this page (--token-values)."];
    return [data, ""];
  }

  report.openGroup = async (row) => {
    const mine = ++turn;
    const { part, rows } = index.groupOf(row);
    const texts = await report.textsOf(part).catch(() => null);
    const [tokens, why] = await tokensOf(part, rows);
    if (mine !== turn) return;
    open = { row, part, rows, texts, tokens, why, look: {} };
    const where = [part.run.number, part.entry.step, part.entry.kind, index.word("uid", row)];
    history.replaceState(null, "", `#rollouts/${where.map(encodeURIComponent).join("/")}`);
    header();
    choose();
    colour();
    cards();
    if (!byId("group").open) byId("group").showModal();
    byId("group-body").scrollTop = 0;
  };

  function header() {
    const { row, part, rows, texts } = open;
    const { columns, word } = index;
    const group = columns.group[row];
    const right = rows.filter((one) => word("outcome", one) === "correct").length;
    const judged = rows.some((one) => word("outcome", one));
    const known = rows.map((one) => columns.reward[one]).filter((reward) => !Number.isNaN(reward));
    const mean = known.length ? known.reduce((sum, reward) => sum + reward, 0) / known.length : NaN;
    const parts = [
      report.runs.length > 1 ? part.run.label : "", `step ${part.entry.step}`, part.entry.kind, word("source", row), word("uid", row),
      judged ? `${right} of ${rows.length} right` : `${rows.length} completions`, `mean reward ${report.score(mean)}`,
    ];
    byId("group-title").textContent = parts.filter(Boolean).join(" · ");
    asked(texts, group);
    byId("group-link").href = location.hash;
    byId("group-expected").textContent = texts ? report.visible(texts.answer[group]) : "";
    byId("group-previous").disabled = report.neighbour(row, -1) === null;
    byId("group-next").disabled = report.neighbour(row, 1) === null;
  }

  // Fills the problem's box, with the prompt's tokens if available.
  function asked(texts, group) {
    const prompt = texts?.prompt?.[group];
    const box = byId("group-problem");
    byId("group-asked").textContent = prompt ? `Prompt as the model read it: ${prompt.length.toLocaleString("en")} tokens` : "Problem";
    if (!prompt) {
      box.textContent = texts ? report.visible(texts.problem[group]) : "The texts can no longer be read.";
      return;
    }
    const left = prompt.length - prompt.tokens.reduce((sum, { length }) => sum + length, 0);
    const token = (text) => make("span", { classes: "token read", textContent: report.visible(text) });
    const [begin, end = []] = prompt.tokens.map((part) => part.map(token));
    box.replaceChildren(...begin, ...(left ? [`\n[… ${left.toLocaleString("en")} tokens left out …]\n`] : []), ...end);
  }

  function decoded(text) {
    try {
      return decodeURIComponent(text);
    } catch {
      return text; // not as this page writes it
    }
  }

  // Opens the group in the page's address, #rollouts/RUN/STEP/SET/UID. Returns whether it exists.
  report.openAddress = () => {
    const [, run, step, kind, uid] = location.hash.match(/^#rollouts\/(\d+)\/(\d+)\/([^/]+)\/([^/]+)$/)?.map(decoded) ?? [];
    if (uid === undefined) return false;
    const { columns, alive, word } = index;
    const row = alive.findIndex((one, i) => one && columns.run[i] === Number(run) && columns.step[i] === Number(step) && word("kind", i) === kind && word("uid", i) === uid);
    if (row >= 0) report.openGroup(row);
    else byId("searching").textContent = `Step ${step} has no group ${uid} here.`;
    return row >= 0;
  };

  function samples() {
    return open.rows.map((row) => row - open.part.first);
  }

  // Fills the list of colour scales; keeps the current choice if possible.
  function choose() {
    const measures = report.measures(open.tokens, samples());
    const before = byId("colour").value;
    const options = measures.map(({ name, title, known }) => make("option", { value: name, textContent: known ? title : `${title}: not recorded`, disabled: !known }));
    byId("colour").replaceChildren(make("option", { value: "", textContent: "nothing" }), ...options);
    const known = measures.filter((measure) => measure.known).map(({ name }) => name);
    byId("colour").value = known.includes(before) || (before === "" && byId("colour").dataset.chosen) ? before : known[0] || "";
    byId("colour").disabled = !open.tokens;
    const every = open.part.run.manifest.about.config["tracking.token_values_every"];
    const missing = open.tokens && !open.part.entry.recorded && open.part.entry.kind === "training";
    const missingText = missing ? `Ratio, KL and advantages of tokens are not recorded at this step${every ? ` (tracking.token_values_every = ${every})` : ""}.` : "";
    byId("group-said").textContent = open.why || missingText;
  }

  function ordered() {
    const by = byId("group-order").value;
    const column = index.columns[by];
    const sign = by === "reward" ? -1 : 1;
    return [...open.rows].sort((a, b) => (Number.isNaN(column[a]) ? 1 : Number.isNaN(column[b]) ? -1 : sign * (column[a] - column[b])) || a - b);
  }

  function colour() {
    const measure = byId("colour").value;
    const scale = measure ? report.scale(open.tokens, measure, samples()) : null;
    byId("scale").replaceChildren(...(scale ? scale.legend : []));
    Object.assign(open.look, { measure, most: scale?.most });
  }

  function cards() {
    byId("cards").replaceChildren(...ordered().map(card));
  }

  function card(row) {
    const { part, texts, tokens } = open;
    const { columns, word } = index;
    const place = row - part.first;
    const outcome = word("outcome", row);
    const known = (name) => (Number.isNaN(columns[name][row]) ? null : columns[name][row]);
    const facts = [
      ["found", word("found", row) ?? "none"],
      ["reward", report.score(known("reward"))],
      ...(word("failure", row) ? [["why not", word("failure", row)]] : []),
      ...Object.entries(part.rewards).map(([name, values]) => [`· ${name}`, report.score(values[place])]),
      ["advantage", known("advantage") !== null ? report.number(known("advantage")) : known("reward") === null ? "none: not scored" : "not recorded"],
      ["length", `${known("length") ?? "–"} tokens${known("given") ? `, ${known("given")} of them given` : ""}`],
    ];
    const turns = texts?.turns[place];
    if (turns) facts.push(["turns", `${turns.length}, tool calls: ${known("calls")}`]);
    const list = make("dl");
    for (const [name, said] of facts) list.append(make("dt", { textContent: name }), make("dd", { textContent: report.visible(String(said)) }));
    const finish = word("finish", row);
    const top = make(
      "div", { classes: "bar" }, make("strong", { textContent: `sample ${columns.sample[row]}` }), outcome ? report.badge(outcome) : null,
      finish ? make("span", { classes: "hint", textContent: finish === "length" ? "truncated" : finish }) : null,
    );
    const text = make("div", { classes: "text" });
    if (turns) report.episodeText(text, turns, tokens, place, open.look);
    else if (tokens) report.tokenText(text, tokens, place, open.look);
    else text.textContent = texts ? report.visible(texts.completion[place]) : "";
    return make("div", { classes: row === open.row ? "card chosen" : "card" }, make("div", { classes: "top" }, top, list), text);
  }

  report.startGroup = () => {
    const go = (by) => {
      const row = open && report.neighbour(open.row, by);
      if (row !== null) report.openGroup(row);
    };
    byId("group-close").addEventListener("click", () => byId("group").close());
    byId("group-previous").addEventListener("click", () => go(-1));
    byId("group-next").addEventListener("click", () => go(1));
    byId("colour").addEventListener("change", () => {
      byId("colour").dataset.chosen = "yes";
      colour();
      report.repaint(byId("cards"), open.look);
    });
    byId("group-order").addEventListener("change", cards);
    byId("group").addEventListener("keydown", (event) => {
      if (["SELECT", "INPUT"].includes(event.target.tagName)) return;
      if (event.key === "ArrowLeft") go(-1);
      if (event.key === "ArrowRight") go(1);
    });
    byId("group").addEventListener("click", (event) => event.target === byId("group") && byId("group").close());
    byId("group").addEventListener("close", () => {
      report.showTip(null);
      history.replaceState(null, "", "#rollouts");
    });
    byId("cards").addEventListener("pointermove", (event) => {
      const about = event.target.about;
      report.showTip(about ? report.explainToken(about) : null, event.clientX, event.clientY);
    });
    byId("cards").addEventListener("pointerleave", () => report.showTip(null));
  };
})();
