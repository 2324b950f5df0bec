// Helpers that create elements. All text is set as text, never as markup.
"use strict";

report.make = (tag, options = {}, ...inner) => {
  const { classes, ...rest } = options;
  const element = Object.assign(document.createElement(tag), rest);
  if (classes) element.className = classes;
  element.append(...inner.filter((one) => one !== null && one !== undefined));
  return element;
};

// The value of a colour variable of report.css, which depends on the reader's scheme.
report.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

report.byId = (id) => document.getElementById(id);

report.score = (value) => (Number.isFinite(value) ? report.number(value) : "not scored");

// 0.1234 -> "0.1234", 1234567 -> "1,234,567", 1.2e-7 -> "1.2e-7", null -> "–"
report.number = (value, digits = 4) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 1e-4) return value.toExponential(2).replace("e+", "e").replace(/\.?0+e/, "e");
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
};

report.badge = (outcome) => report.make("span", { classes: `badge ${/^\w+$/.test(outcome) ? outcome : ""}`, textContent: outcome });

// Shows invisible characters and direction marks by their code points.
report.visible = (text) =>
  text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]/gu, (mark) =>
    `⟨${mark.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}⟩`,
  );

// Fills a select, with an option for "any" first; keeps the current choice.
report.choices = (select, values, any) => {
  const chosen = select.value;
  const options = values.map(([value, text]) => report.make("option", { value, textContent: text }));
  if (any) options.unshift(report.make("option", { value: "", textContent: any }));
  select.replaceChildren(...options);
  if (options.some((option) => option.value === chosen)) select.value = chosen;
};

report.table = (headings, rows) => {
  const head = headings.map((text) => report.make("th", { textContent: text.replace(/^#/, ""), classes: text.startsWith("#") ? "number" : "" }));
  const table = report.make("table", { classes: "plain" }, report.make("thead", {}, report.make("tr", {}, ...head)));
  table.append(report.make("tbody", {}, ...rows));
  return report.make("div", { classes: "scroll" }, table);
};

report.cell = (inner, classes = "") => report.make("td", { classes }, inner);

report.showTip = (text, x, y) => {
  const tip = report.byId("tip");
  if (text === null) {
    tip.hidden = true;
    return;
  }
  tip.textContent = text;
  tip.hidden = false;
  // A dialog covers the page, so its tooltips must be inside of it.
  const home = document.querySelector("dialog[open]") || document.body;
  if (tip.parentNode !== home) home.append(tip);
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 20 + box.height > innerHeight ? y - box.height - 10 : y + 18}px`;
};

// Calls ``work`` once ``wait`` milliseconds have passed since the last call.
report.settled = (work, wait) => {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(work, wait);
  };
};

report.pause = () => new Promise((done) => setTimeout(done, 0));
