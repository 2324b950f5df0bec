// An episode as turns: the policy's text, each tool call with its result, the environment's answer.
"use strict";

(() => {
  const { make } = report;
  const LONGEST = 160; // characters of a call's arguments and result in its line

  const line = (text) => report.visible(text.trim().replaceAll(/\s*\n\s*/g, " ↵ "));
  const cut = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST - 1)}…` : text);

  function time(seconds) {
    return seconds < 1 ? `${report.number(seconds * 1e3, 3)} ms` : `${report.number(seconds, 3)} s`;
  }

  // The line of a call: its name, outcome and seconds; the whole result if tokens do not show it.
  function call({ name, arguments: asked, result, outcome, seconds }, whole) {
    const head = make("div", { classes: "bar" }, make("code", { textContent: `${name || "?"}(${cut(line(asked))})` }), report.badge(outcome),
      make("span", { classes: "hint", textContent: time(seconds) }));
    const answer = make("div", { classes: "result", textContent: whole ? report.visible(result) : `→ ${cut(line(result))}` });
    return make("div", { classes: "call" }, head, answer);
  }

  function said(who, title, ...inner) {
    return make("div", { classes: `said-by ${who}` }, make("div", { classes: "who", textContent: title }), ...inner);
  }

  // Start and end of each turn's action among the tokens of all rows.
  function places(turns, data, sample) {
    let at = 0;
    return turns.map(({ row, end }) => {
      const start = data.rows[sample][row];
      let begin = Math.max(at, start);
      for (let i = 0; i < data.given[sample].length; i += 2) if (data.given[sample][i] === begin) begin = data.given[sample][i + 1];
      at = start + end;
      return [begin, at];
    });
  }

  // Fills ``box``. With token values ``data``, texts are coloured tokens, given tokens shaded.
  report.episodeText = (box, turns, data, sample, look) => {
    const found = data ? places(turns, data, sample) : [];
    const total = data ? data.tokens[sample].length : 0;
    const text = (begin, end) => {
      const tokenBox = make("div", { classes: "tokens" });
      report.tokenText(tokenBox, data, sample, look, begin, end);
      return tokenBox;
    };
    turns.forEach((turn, i) => {
      if (i && turn.row !== turns[i - 1].row) {
        box.append(make("div", { classes: "rewritten", textContent: `row ${turn.row + 1}: the chat template rewrote what came before` }));
      }
      const reward = turn.reward === null ? "" : ` · reward ${report.number(turn.reward)}`;
      const [begin, end] = found[i] ?? [0, 0];
      box.append(said("policy", `turn ${i + 1} · policy${reward}`, data ? text(begin, end) : make("div", { textContent: report.visible(turn.text) })));
      // Given tokens after the action; before a new row they are in its context.
      const next = i + 1 < turns.length ? (turns[i + 1].row === turn.row ? found[i + 1]?.[0] : data?.rows[sample][turns[i + 1].row]) : total;
      const given = data && next > end;
      const inner = turn.calls.map((one) => call(one, !given));
      if (given) inner.push(text(end, next));
      else if (turn.observation) inner.push(make("div", { textContent: report.visible(turn.observation) }));
      if (inner.length) box.append(said("environment", turn.calls.length ? "tools" : "environment", ...inner));
    });
  };
})();
