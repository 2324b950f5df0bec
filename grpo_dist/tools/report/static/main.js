// Starts the page and, when it is served, keeps it up to date.
"use strict";

(async () => {
  const { make, byId } = report;
  const EVERY = 2000; // milliseconds between requests to the server
  const TABS = ["curves", "timeline", "rollouts", "events", "settings"];
  let tag = null;

  function show(tab) {
    for (const name of TABS) byId(name).hidden = name !== tab;
    for (const button of document.querySelectorAll("nav button")) button.setAttribute("aria-selected", String(button.dataset.tab === tab));
    if (tab === "rollouts") report.openRollouts();
    if (tab === "timeline") report.updateTimeline();
  }

  function chips() {
    byId("runs").replaceChildren(
      ...report.runs.map((run) => {
        const mark = make("span", { classes: "dot" });
        mark.style.background = run.colour;
        const chip = make("button", { classes: "run", title: `${run.manifest.path}: show or hide` }, mark, run.label);
        chip.setAttribute("aria-pressed", String(run.shown));
        chip.addEventListener("click", () => {
          run.shown = !run.shown;
          chip.setAttribute("aria-pressed", String(run.shown));
          report.showRuns();
          report.updateEvents();
          report.refilter();
        });
        return chip;
      }),
    );
  }

  function take(manifest) {
    manifest.runs.forEach((runManifest, number) => {
      const run = (report.runs[number] ||= { number, colour: report.colours[number % report.colours.length], shown: true, pieces: {} });
      run.manifest = runManifest;
      run.label = runManifest.label;
    });
  }

  async function update() {
    await Promise.all(report.runs.map(report.loadSeries));
    report.updateAbout();
    report.updateCurves();
    await report.updateTimeline();
    await report.updateRollouts();
  }

  // Fetches the manifest; null while it is unchanged.
  async function fetchManifest() {
    const answer = await fetch("manifest", { cache: "no-cache", signal: AbortSignal.timeout(30_000) });
    if (!answer.ok) throw Object.assign(new Error(await answer.text()), { reported: true });
    const found = answer.headers.get("ETag");
    if (found === tag) return null;
    const manifest = await answer.json();
    tag = found;
    return manifest;
  }

  function explain(error) {
    const gone = error instanceof TypeError || error instanceof DOMException;
    const here = report.runs.length ? "; the page shows the last data." : ".";
    const reason = error.reported ? `The run cannot be read: ${error.message}` : "the run is being rewritten …";
    byId("state").textContent = gone ? `The server does not answer${here}` : reason;
  }

  async function first() {
    for (;;) {
      try {
        return await fetchManifest();
      } catch (error) {
        explain(error);
        await new Promise((waited) => setTimeout(waited, EVERY));
      }
    }
  }

  async function follow() {
    try {
      const manifest = await fetchManifest();
      if (manifest) {
        take(manifest);
        await update();
      }
      const done = report.runs.every(({ manifest: { about } }) => about.done);
      byId("state").textContent = `${done ? "finished" : "live"}, updated ${new Date().toLocaleTimeString("sv-SE")}`;
    } catch (error) {
      tag = null; // fetch again what failed
      explain(error);
    }
    setTimeout(follow, EVERY);
  }

  byId("state").textContent = "loading …";
  let manifest = report.begin.manifest;
  if (report.live) manifest = await first();
  take(manifest);
  byId("what").textContent = report.runs.length === 1 ? report.runs[0].label : `${report.runs.length} runs`;
  chips();
  for (const start of [report.startCurves, report.startTimeline, report.startRollouts, report.startGroup, report.startAbout]) start();
  for (const button of document.querySelectorAll("nav button")) {
    button.addEventListener("click", () => {
      history.replaceState(null, "", `#${button.dataset.tab}`);
      show(button.dataset.tab);
    });
  }
  const tabOf = () => location.hash.slice(1).split("/")[0];
  show(TABS.includes(tabOf()) ? tabOf() : "curves");
  try {
    await update();
    byId("state").textContent = "";
    report.openAddress();
    addEventListener("hashchange", () => TABS.includes(tabOf()) && (show(tabOf()), report.openAddress()));
  } catch (error) {
    if (!report.live) {
      byId("state").textContent = `This page cannot be shown: ${error.message}`;
      throw error;
    }
    tag = null;
    explain(error);
  }
  document.body.dataset.ready = "yes";
  if (report.live) setTimeout(follow, EVERY);
})();
