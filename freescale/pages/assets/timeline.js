"use strict";
window.starters.push((root) => root.querySelectorAll(".timeline:not([data-ready])").forEach((figure) => {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const [view, canvas, tip, labels, choice] =
    [".view", "canvas", ".tip", ".labels", "select"].map((name) => figure.querySelector(name));
  const [AXIS, ROW, THIN, GAP, FOOT] = [22, 26, 12, 6, 16];
  const words = ["compute", "waiting for the last rank", "exposed communication", "host and the rest", "other thread"];
  let shown, from, to, tops, height;

  const time = (us) => us === 0 ? "0" : Math.abs(us) >= 1e6 ? (us / 1e6).toPrecision(4) + " s"
    : Math.abs(us) >= 1000 ? (us / 1000).toPrecision(4) + " ms" : Math.round(us) + " us";
  const colour = (name) => getComputedStyle(figure).getPropertyValue(name).trim();

  const open = (index) => {
    shown = data.windows[index];
    [from, to] = [0, shown.end];
    tops = [];
    height = AXIS;
    labels.replaceChildren();
    labels.style.width = "0";
    for (const [text, thin] of shown.lanes) {
      tops.push(height);
      const label = labels.appendChild(document.createElement("div"));
      label.textContent = text;
      label.title = text;
      label.className = thin ? "thin" : "";
      label.style.top = height + "px";
      label.style.height = (thin ? THIN : ROW) + "px";
      height += (thin ? THIN : ROW) + GAP;
    }
    height += FOOT;
    // As wide as the longest name: "rank 151" must not read "rank 15".
    const widths = [...labels.children].map((label) => label.scrollWidth + 1);
    labels.style.width = Math.min(Math.max(40, ...widths), 0.34 * figure.clientWidth) + "px";
    view.style.height = labels.style.height = height + "px";
    draw();
  };

  const draw = () => {
    const [width, ratio] = [view.clientWidth, window.devicePixelRatio || 1];
    [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    const scale = width / (to - from);
    const fills = ["--tone0", "--tone1", "--tone2", "--tone3", "--tone4"].map(colour);
    const [soft, rule] = [colour("--soft"), colour("--rule")];
    pen.font = "11.5px system-ui, sans-serif";
    pen.textBaseline = "middle";
    // Round times along the top.
    const rough = (to - from) * 80 / width;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((size) => size * power).find((size) => size >= rough);
    pen.fillStyle = soft;
    pen.strokeStyle = rule;
    pen.lineWidth = 1;
    for (let tick = Math.ceil(from / step) * step; tick <= to; tick += step) {
      const x = Math.round((tick - from) * scale) + 0.5;
      pen.beginPath(); pen.moveTo(x, AXIS - 4); pen.lineTo(x, height - FOOT); pen.stroke();
      const text = time(Math.round(tick * 10) / 10).replace(/\.0+ /, " ").replace(/(\.\d*?)0+ /, "$1 ");
      const half = pen.measureText(text).width / 2;
      pen.textAlign = "center";
      pen.fillText(text, Math.min(Math.max(x, half), width - half), 8);
    }
    for (const [lane, kind, , , start, length] of shown.pieces) {
      if (start + length < from || start > to) continue;
      const x = Math.max(-1, (start - from) * scale);
      const right = Math.min(width + 1, (start + length - from) * scale);
      const tall = shown.lanes[lane][1] ? THIN : ROW;
      pen.globalAlpha = kind === 3 ? 0.28 : kind === 4 ? 0.45 : 1;
      pen.fillStyle = fills[kind];
      pen.fillRect(x, tops[lane], Math.max(0.6, right - x - (right - x > 4 ? 0.7 : 0)), tall);
    }
    pen.globalAlpha = 1;
    // Names where there is room for them.
    pen.fillStyle = colour("--on-tone");
    pen.textAlign = "left";
    for (const [lane, kind, name, , start, length] of shown.pieces) {
      if (kind > 2 || shown.lanes[lane][1]) continue;
      const x = Math.max(0, (start - from) * scale);
      const room = Math.min(width, (start + length - from) * scale) - x - 10;
      if (room > 40 && pen.measureText(shown.names[name]).width <= room)
        pen.fillText(shown.names[name], x + 5, tops[lane] + ROW / 2 + 0.5);
    }
    pen.strokeStyle = colour("--ink");
    pen.fillStyle = soft;
    pen.textAlign = "center";
    let before = 0;
    for (const [step, end] of shown.borders) {
      const [left, right] = [Math.max(0, (before - from) * scale), Math.min(width, (end - from) * scale)];
      before = end;
      if (right - left > pen.measureText(`step ${step}`).width + 8)
        pen.fillText(`step ${step}`, (left + right) / 2, height - FOOT / 2 + 1);
      const x = Math.round((end - from) * scale) + 0.5;
      if (x < 0 || x > width) continue;
      pen.setLineDash([3, 3]);
      pen.beginPath(); pen.moveTo(x, AXIS - 6); pen.lineTo(x, height); pen.stroke();
      pen.setLineDash([]);
    }
    figure.dataset.ready = "yes";
  };

  const hide = () => { tip.hidden = true; };
  const tell = (piece, x) => {
    const [lane, kind, name, step, , length] = piece;
    tip.hidden = false;
    tip.replaceChildren();
    for (const text of [shown.names[name], words[kind], `step ${step}, ${shown.lanes[lane][0]}`]) {
      tip.appendChild(document.createElement("div")).textContent = text;
    }
    tip.firstChild.className = "first";
    tip.appendChild(document.createElement("div")).textContent = time(length);
    const width = view.clientWidth;
    tip.style.left = x < width / 2 ? x + 14 + "px" : "auto";
    tip.style.right = x < width / 2 ? "auto" : width - x + 14 + "px";
    const below = tops[lane] + (shown.lanes[lane][1] ? THIN : ROW) + 6;
    tip.style.top = below + 96 > height && tops[lane] > 100 ? tops[lane] - 100 + "px" : below + "px";
  };
  const point = (event) => {
    const box = view.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const us = from + x / box.width * (to - from);
    const slack = 2 / box.width * (to - from);
    let best = null;
    for (const piece of shown.pieces) {
      const tall = shown.lanes[piece[0]][1] ? THIN : ROW;
      if (y < tops[piece[0]] || y > tops[piece[0]] + tall) continue;
      if (us < piece[4] - slack || us > piece[4] + piece[5] + slack) continue;
      if (best === null || piece[5] < best[5]) best = piece;
    }
    if (best) tell(best, x); else hide();
  };
  const set = (low, high) => {
    const length = Math.min(shown.end, Math.max(5, high - low));
    from = Math.max(0, Math.min(shown.end - length, low));
    to = from + length;
    hide();
    draw();
  };
  const zoom = (factor, centre) => set(centre - (centre - from) * factor, centre + (to - centre) * factor);
  const middle = () => (from + to) / 2;
  const act = {
    in: () => zoom(0.5, middle()), out: () => zoom(2, middle()), fit: () => set(0, shown.end),
    left: () => set(from - (to - from) / 4, to - (to - from) / 4),
    right: () => set(from + (to - from) / 4, to + (to - from) / 4),
  };
  for (const button of figure.querySelectorAll("button")) {
    button.addEventListener("click", () => act[button.dataset.do]());
  }
  view.addEventListener("keydown", (event) => {
    const what = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "fit" }[event.key];
    if (what) { act[what](); event.preventDefault(); } else if (event.key === "Escape") hide();
  });
  view.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    const box = view.getBoundingClientRect();
    zoom(1.0015 ** event.deltaY, from + (event.clientX - box.left) / box.width * (to - from));
    event.preventDefault();
  }, { passive: false });
  const fingers = new Map();
  view.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, event.clientX);
    point(event);
  });
  const lift = (event) => fingers.delete(event.pointerId);
  for (const name of ["pointerup", "pointercancel", "pointerleave"]) view.addEventListener(name, lift);
  view.addEventListener("pointerleave", hide);
  view.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) { point(event); return; }
    const before = [...fingers.values()];
    const moved = event.clientX - fingers.get(event.pointerId);
    fingers.set(event.pointerId, event.clientX);
    const box = view.getBoundingClientRect();
    if (fingers.size === 1) {
      const shift = moved / box.width * (to - from);
      if (Math.abs(moved) > 0) set(from - shift, to - shift);
    } else if (fingers.size === 2) {
      const after = [...fingers.values()];
      const apart = [Math.abs(before[0] - before[1]), Math.abs(after[0] - after[1])];
      const centre = ((after[0] + after[1]) / 2 - box.left) / box.width;
      if (apart[1] > 5) zoom(apart[0] / apart[1], from + centre * (to - from));
    }
  });
  choice.addEventListener("change", () => open(Number(choice.value)));
  new ResizeObserver(draw).observe(view);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const redraw = () => { if (figure.isConnected) draw(); else dark.removeEventListener("change", redraw); };
  dark.addEventListener("change", redraw);
  open(0);
}));
window.starters.at(-1)(document);
