// Loads pieces of data from the page itself or from its server. See grpo_dist/tools/report/source.py.
"use strict";

const report = (() => {
  const begin = JSON.parse(document.getElementById("begin").textContent);
  const live = begin.manifest.live;
  const embedded = new Map();
  for (const element of document.querySelectorAll("script[data-piece]")) embedded.set(element.dataset.piece, element);

  function bytesOf(text) {
    if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
    return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  }

  async function fromPage(name) {
    const element = embedded.get(name);
    if (!element) throw new Error(`${name} is not in this page`);
    const packed = new Blob([bytesOf(element.textContent)]);
    const stream = packed.stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  }

  async function fromServer(name, version) {
    const path = name.split("/").map(encodeURIComponent).join("/");
    const answer = await fetch(`${path}?v=${encodeURIComponent(version)}`);
    if (!answer.ok) throw new Error(`${name}: ${answer.status}`);
    return answer.json();
  }

  // Loads the piece ``name`` of run number ``run``; throws when it no longer exists.
  function piece(run, name, version = "") {
    return live ? fromServer(`${run}/${name}`, version) : fromPage(`${run}/${name}`);
  }

  const known = begin.catalogue.map(([pattern, ...words]) => [new RegExp(`^(?:${pattern})$`), words]);

  // Looks up a metric in the metric catalogue; "" for unknown ones.
  function described(name) {
    const [unit, meaning, lookFor] = known.find(([test]) => test.test(name))?.[1] ?? ["", "", ""];
    return { unit, meaning, lookFor };
  }

  // The place of a metric in the catalogue, most important namespaces first; unknown ones are last.
  function rank(name) {
    const namespace = name.split("/")[0];
    const place = begin.namespaces.indexOf(namespace);
    return place < 0 ? begin.namespaces.length : place;
  }

  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const colours = dark
    ? ["#6ea8e6", "#f0935c", "#6cc98b", "#c08fe0", "#dfb74a", "#55c0cc", "#e87aa4", "#a3afba"]
    : ["#1f5fa6", "#c4561c", "#2f8f4e", "#8a4fb0", "#b8860b", "#15808a", "#b03060", "#5b6470"];

  return { live, begin, piece, described, rank, colours, runs: [] };
})();
