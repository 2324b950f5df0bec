// Tokens in colour: by log-prob, ratio, advantage or KL. grpo_dist/tools/report/tokens.py defines the numbers.
"use strict";

(() => {
  const { make } = report;
  const AT_ONCE = 700; // tokens of a completion to draw before scrolling
  const RED = [214, 84, 60];
  const BLUE = [66, 128, 200];
  const GREEN = [72, 160, 98];
  const PURPLE = [140, 92, 190];

  // least: the smallest range a scale has, so that noise stays white.
  const MEASURES = {
    logprob: { title: "log-prob (engine)", columns: ["logprob"], low: [RED], least: 1, signed: false, text: (v) => `log-prob ${report.number(v)} nats, p = ${report.number(Math.exp(v), 3)}` },
    log_ratio: { title: "ratio (trainer / engine)", columns: ["log_ratio"], low: [BLUE], high: RED, least: 0.02, signed: true, text: (v) => `ratio ${Math.exp(v).toFixed(4)}` },
    advantage: { title: "advantage", columns: ["advantage"], low: [RED], high: GREEN, least: 0.5, signed: true, text: (v) => `advantage ${report.number(v)}` },
    kl: { title: "KL to the reference", columns: ["kl"], high: PURPLE, least: 0.05, signed: false, text: (v) => `KL ${report.number(v)} nats` },
  };

  // Whether an environment inserted the token; "given" has start and end of each span.
  function isGiven(data, sample, token) {
    const ranges = data.given[sample];
    for (let i = 0; i < ranges.length; i += 2) if (token >= ranges[i] && token < ranges[i + 1]) return true;
    return false;
  }

  // The value of a token; null without one.
  function value(data, measure, sample, token) {
    if (isGiven(data, sample, token)) return null;
    const values = data[measure]?.[sample];
    const raw = Array.isArray(values) ? values[token] : values;
    return raw === null || raw === undefined ? null : raw / data.scales[measure];
  }

  // The 98th percentile of the absolute values of these samples.
  function extent(data, measure, samples) {
    const sizes = [];
    for (const sample of samples) {
      const recorded = data[measure]?.[sample];
      if (recorded === null || recorded === undefined) continue;
      const every = Array.isArray(recorded) ? Math.max(1, Math.floor(recorded.length / 2000)) : 1;
      const some = Array.isArray(recorded) ? recorded : [recorded];
      for (let i = 0; i < some.length; i += every) if (some[i] !== null) sizes.push(Math.abs(some[i]) / data.scales[measure]);
    }
    sizes.sort((a, b) => a - b);
    return Math.max(MEASURES[measure].least, sizes[Math.floor(sizes.length * 0.98)] || 0);
  }

  function colour(measure, at, most) {
    const { low, high } = MEASURES[measure];
    const [red, green, blue] = at < 0 ? low[0] : high || low[0];
    return `rgba(${red}, ${green}, ${blue}, ${(Math.min(1, Math.abs(at) / most) * 0.75).toFixed(3)})`;
  }

  report.measures = (data, samples) =>
    Object.entries(MEASURES).map(([name, { title }]) => ({
      name, title, known: Boolean(data) && samples.some((sample) => data[name]?.[sample] !== null && data[name]?.[sample] !== undefined),
    }));

  report.scale = (data, measure, samples) => {
    const most = extent(data, measure, samples);
    const { signed } = MEASURES[measure];
    const from = signed || measure === "logprob" ? -most : 0;
    const to = measure === "logprob" ? 0 : most;
    const show = measure === "log_ratio" ? (at) => Math.exp(at).toFixed(most < 0.1 ? 3 : 2) : (at) => report.number(at, 3);
    const stops = [0, 0.25, 0.5, 0.75, 1].map((share) => colour(measure, from + share * (to - from), most));
    const bar = make("i");
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const middle = signed ? [` (white: ${show(0)})`] : [];
    return { most, legend: [show(from), bar, show(to), ...middle] };
  };

  function paint(token, { measure, most }) {
    const { data, sample, token: place } = token.about;
    const at = measure ? value(data, measure, sample, place) : null;
    token.style.background = at === null ? "" : colour(measure, at, most);
  }

  // Draws the visible tokens of a sample from ``begin`` to ``last``, and more on scrolling. ``look``: {measure,
  // most}, "" for no colour; it is read when tokens are drawn.
  report.tokenText = (box, data, sample, look, begin = 0, last = data.tokens[sample].length) => {
    const tokens = data.tokens[sample];
    const more = make("button");
    let drawn = begin;
    const draw = () => {
      const piece = document.createDocumentFragment();
      const end = Math.min(drawn + AT_ONCE, last);
      for (; drawn < end; drawn++) {
        const text = report.visible(data.vocabulary[tokens[drawn]]).replaceAll("\n", "↵\n");
        const token = make("span", { classes: isGiven(data, sample, drawn) ? "token given" : "token", textContent: text });
        token.about = { data, sample, token: drawn };
        paint(token, look);
        piece.append(token);
      }
      seen.unobserve(more);
      more.remove();
      box.append(piece);
      if (drawn >= last) return;
      more.textContent = `${(last - drawn).toLocaleString("en")} more tokens`;
      box.append(more);
      seen.observe(more); // fires again even if already in view
    };
    const seen = new IntersectionObserver((entries) => entries.some(({ isIntersecting }) => isIntersecting) && draw());
    more.addEventListener("click", draw);
    draw();
  };

  // Recolours the drawn tokens.
  report.repaint = (box, look) => {
    for (const token of box.querySelectorAll(".token")) paint(token, look);
  };

  report.explainToken = ({ data, sample, token }) => {
    const text = data.vocabulary[data.tokens[sample][token]];
    const lines = [`token ${token + 1} of ${data.tokens[sample].length}: ${text === "" ? "(part of the previous character)" : JSON.stringify(text)}`];
    if (isGiven(data, sample, token)) lines.push("given: not sampled, and not trained");
    for (const [name, { text: said }] of Object.entries(MEASURES)) {
      const at = value(data, name, sample, token);
      if (at !== null) lines.push(said(at));
    }
    return lines.join("\n");
  };
})();
