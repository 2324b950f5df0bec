// Timeline of the workers: a bar for each span.
"use strict";

(() => {
  const { make, byId } = report;
  const colours = ["#4a90d0", "#e08a4a", "#59b377", "#a878c8", "#c9a63a", "#3fa6b0", "#d0607f", "#7d8894", "#8fb338", "#b07a50"];
  const stageColours = new Map(); // stage -> colour, in order of appearance
  const LANE = 20;
  const NAMES = 110;
  let run = null;
  let lanes = []; // [{worker, first, spans: [{stage, step, begin, end}]}], spans of a lane do not overlap
  let marks = []; // [{step, begin}]
  let view = { from: 0, to: 1 };
  let all = { from: 0, to: 1 };
  let shown = ""; // what is drawn: run, steps and version
  let drag = null;

  const colour = (stage) => {
    if (!stageColours.has(stage)) stageColours.set(stage, colours[stageColours.size % colours.length]);
    return stageColours.get(stage);
  };

  function stepsOf(of) {
    return of.pieces.clock.flatMap(({ data }) => data.step).sort((a, b) => a - b);
  }

  function newest(of) {
    const steps = stepsOf(of);
    byId("timeline-from").value = steps[Math.max(0, steps.length - 5)] ?? "";
    byId("timeline-to").value = steps[steps.length - 1] ?? "";
  }

  function say(text) {
    byId("timeline-said").textContent = text;
    byId("timeline-said").hidden = !text;
  }

  async function load(keepView) {
    const from = Number(byId("timeline-from").value);
    const to = Number(byId("timeline-to").value);
    const of = run;
    const wanted = of.pieces.clock.flatMap(({ data }, i) => (data.step.some((step) => step >= from && step <= to) ? [i] : []));
    if (!of.pieces.clock.length) say("This run has no timeline.jsonl; older versions did not write it.");
    else if (!wanted.length) say(`The timeline has no step from ${from} to ${to}.`);
    else if (wanted.some((i) => !of.manifest.spans[i])) say("This page has only the newest spans of the timeline; these steps are older.");
    else say("");
    const parts = await Promise.all(
      wanted.filter((i) => of.manifest.spans[i]).map((i) => report.piece(of.number, `spans/${i}`, of.manifest.spans[i]).catch(() => null)),
    );
    if (of !== run) return;
    arrange(parts.filter(Boolean), from, to);
    if (!keepView) view = { ...all };
    legend();
    draw();
  }

  function arrange(parts, from, to) {
    const byWorker = new Map();
    marks = [];
    all = { from: Infinity, to: -Infinity };
    const steps = new Map(); // the last line of a step counts
    for (const part of parts) for (const [step, origin, flat] of part.steps) if (step >= from && step <= to) steps.set(step, [origin, flat, part]);
    for (const [step, [origin, flat, part]] of steps) {
      marks.push({ step, begin: origin });
      for (let i = 0; i < flat.length; i += 4) {
        const begin = origin + flat[i + 2] / 1e3;
        const span = { stage: part.stages[flat[i + 1]], step, begin, end: begin + flat[i + 3] / 1e3 };
        const worker = part.workers[flat[i]];
        if (!byWorker.has(worker)) byWorker.set(worker, []);
        byWorker.get(worker).push(span);
        all.from = Math.min(all.from, span.begin);
        all.to = Math.max(all.to, span.end);
      }
    }
    if (all.to <= all.from) all.to = all.from + 1;
    const order = ["driver", "rollout", "environment", "reward", "reference", "policy"];
    const rank = (worker) => (order.indexOf(worker.replace(/-\d+$/, "")) + 1 || 99);
    const workers = [...byWorker.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
    lanes = workers.flatMap((worker) => inLanes(worker, byWorker.get(worker)));
  }

  function inLanes(worker, spans) {
    spans.sort((a, b) => a.begin - b.begin);
    const workerLanes = [];
    for (const span of spans) {
      let lane = workerLanes.find(({ end }) => end <= span.begin + 1e-3);
      if (!lane) workerLanes.push((lane = { worker, first: workerLanes.length === 0, spans: [], end: 0 }));
      lane.spans.push(span);
      lane.end = span.end;
    }
    return workerLanes;
  }

  function legend() {
    const stages = [...new Set(lanes.flatMap(({ spans }) => spans.map(({ stage }) => stage)))].sort();
    byId("timeline-legend").replaceChildren(
      ...stages.map((stage) => {
        const mark = make("i");
        mark.style.background = colour(stage);
        return make("span", {}, mark, stage);
      }),
    );
  }

  function draw() {
    const canvas = byId("timeline-drawing");
    const width = canvas.clientWidth;
    if (!width) return;
    const height = Math.max(60, lanes.length * LANE + 34);
    const scale = devicePixelRatio;
    canvas.style.height = `${height}px`;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.font = "11px system-ui, sans-serif";
    const x = (time) => NAMES + ((time - view.from) / (view.to - view.from)) * (width - NAMES - 6);
    lanes.forEach((lane, row) => {
      const top = 4 + row * LANE;
      if (lane.first && row) {
        context.fillStyle = report.colour("line");
        context.fillRect(0, top - 1, width, 1);
      }
      let last = -1;
      for (const { stage, begin, end } of lane.spans) {
        if (end < view.from || begin > view.to) continue;
        const left = Math.max(NAMES, x(begin));
        const right = Math.min(width, x(end));
        if (right <= last + 0.3) continue; // hidden by the previous one
        context.fillStyle = colour(stage);
        context.fillRect(left, top + 1, Math.max(0.7, right - left), LANE - 4);
        last = right;
      }
    });
    context.fillStyle = report.colour("page");
    context.fillRect(0, 0, NAMES - 1, height);
    context.fillStyle = report.colour("text");
    lanes.forEach((lane, row) => {
      if (lane.first) context.fillText(lane.worker.length > 17 ? `${lane.worker.slice(0, 16)}…` : lane.worker, 6, 4 + row * LANE + 13);
    });
    ruler(context, x, width, height);
  }

  function ruler(context, x, width, height) {
    const bottom = height - 26;
    context.strokeStyle = report.colour("faint");
    context.fillStyle = report.colour("quiet");
    let free = 0;
    for (const { step, begin } of marks) {
      const at = x(begin);
      if (at < NAMES || at > width) continue;
      context.beginPath();
      context.setLineDash([3, 3]);
      context.moveTo(at, 0);
      context.lineTo(at, bottom);
      context.stroke();
      if (at < free) continue;
      const text = `step ${step}`;
      context.fillText(text, at + 3, height - 15);
      free = at + context.measureText(text).width + 10;
    }
    context.setLineDash([]);
    const length = view.to - view.from;
    const size = 10 ** Math.floor(Math.log10(length / 4));
    const every = [1, 2, 5, 10].map((times) => times * size).find((one) => length / one <= 9);
    for (let time = Math.ceil((view.from - all.from) / every) * every; time <= view.to - all.from; time += every) {
      const text = `${Number(time.toPrecision(6))} s`;
      const at = Math.min(x(all.from + time), width - context.measureText(text).width - 4);
      if (at >= NAMES) context.fillText(text, at, height - 3);
    }
  }

  function pointed(event) {
    const box = byId("timeline-drawing").getBoundingClientRect();
    const share = (event.clientX - box.left - NAMES) / (box.width - NAMES - 6);
    return { time: view.from + share * (view.to - view.from), row: Math.floor((event.clientY - box.top - 4) / LANE), share };
  }

  function explain(event) {
    const { time, row, share } = pointed(event);
    const lane = lanes[row];
    const near = ((view.to - view.from) / byId("timeline-drawing").clientWidth) * 2;
    const span = share >= 0 && lane?.spans.find(({ begin, end }) => time >= begin - near && time <= end + near);
    const text = span && `${lane.worker}: ${span.stage}\nstep ${span.step}, ${report.number(span.end - span.begin)} s, starting at ${(span.begin - all.from).toFixed(3)} s`;
    report.showTip(text || null, event.clientX, event.clientY);
  }

  function zoom(event) {
    event.preventDefault();
    const { time } = pointed(event);
    const factor = Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300)));
    const length = Math.min((view.to - view.from) * factor, (all.to - all.from) * 1.02);
    if (length < 1e-3) return;
    const share = (time - view.from) / (view.to - view.from);
    moveTo(time - share * length, length);
  }

  function moveTo(from, length) {
    const begin = Math.max(all.from - length * 0.02, Math.min(from, all.to - length * 0.98));
    view = { from: begin, to: begin + length };
    draw();
  }

  report.updateTimeline = async () => {
    report.choices(byId("timeline-run"), report.runs.map(({ number, label }) => [String(number), label]));
    const of = report.runs[Number(byId("timeline-run").value) || 0];
    if (!of?.pieces.clock) return; // nothing is loaded yet
    const other = of !== run;
    const steps = stepsOf(of);
    const followed = Number(byId("timeline-to").value) === report.timelineEnd; // the newest steps were shown
    run = of;
    if (other || (followed && steps[steps.length - 1] !== report.timelineEnd)) newest(of);
    report.timelineEnd = steps[steps.length - 1];
    const now = `${of.number} ${byId("timeline-from").value} ${byId("timeline-to").value} ${of.manifest.spans.join()}`;
    if (byId("timeline").hidden || now === shown) return;
    shown = now;
    await load(false);
  };

  report.startTimeline = () => {
    const canvas = byId("timeline-drawing");
    byId("timeline-run").addEventListener("change", () => report.updateTimeline());
    byId("timeline-newest").addEventListener("click", () => {
      newest(run);
      report.updateTimeline();
    });
    byId("timeline-all").addEventListener("click", () => {
      view = { ...all };
      draw();
    });
    for (const id of ["timeline-from", "timeline-to"]) byId(id).addEventListener("change", () => report.updateTimeline());
    canvas.addEventListener("wheel", zoom, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      drag = { x: event.clientX, from: view.from };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (!drag) return explain(event);
      const length = view.to - view.from;
      moveTo(drag.from - ((event.clientX - drag.x) / (canvas.clientWidth - NAMES - 6)) * length, length);
    });
    canvas.addEventListener("pointerup", () => (drag = null));
    canvas.addEventListener("pointerleave", () => report.showTip(null));
    new ResizeObserver(draw).observe(canvas.parentElement);
  };
})();
