"use strict";
// What brings a part of the page to life; a live page does it again for parts that are new.
window.starters = [];
window.starters.push((root) => root.querySelectorAll("[data-chart]:not([data-ready])").forEach((chart) => {
  const data = JSON.parse(chart.dataset.chart);
  const [plot, cursor, tip] = [".plot", ".cursor", ".tip"].map((name) => chart.querySelector(name));
  const put = (parent, tag, text, tone) => {
    const node = parent.appendChild(document.createElement(tag));
    node.textContent = text;
    if (tone !== undefined) node.className = "tone" + tone;
    return node;
  };
  let at = data.x.length - 1;
  const show = (index) => {
    at = Math.max(0, Math.min(data.x.length - 1, index));
    cursor.hidden = tip.hidden = false;
    cursor.replaceChildren();
    tip.replaceChildren();
    cursor.style.left = 100 * data.x[at] + "%";
    tip.style.left = data.x[at] < 0.5 ? `calc(${100 * data.x[at]}% + 14px)` : "auto";
    tip.style.right = data.x[at] < 0.5 ? "auto" : `calc(${100 - 100 * data.x[at]}% + 14px)`;
    put(tip, "div", data.at[at]);
    for (const row of data.rows) {
      const line = put(tip, "div", "");
      put(line, "i", "", row.tone).classList.add("key", row.dashed ? "dashed" : "full");
      line.append(row.name);
      put(line, "b", row.text[at]);
      if (row.y[at] !== null) put(cursor, "i", "", row.tone).style.bottom = 100 * row.y[at] + "%";
    }
  };
  const hide = () => { cursor.hidden = tip.hidden = true; };
  const follow = (event) => {
    const box = plot.getBoundingClientRect();
    const x = (event.clientX - box.left) / box.width;
    let [low, high] = [0, data.x.length - 1];
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (data.x[middle] < x) low = middle; else high = middle;
    }
    show(Math.abs(data.x[low] - x) <= Math.abs(data.x[high] - x) ? low : high);
  };
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -data.x.length, End: data.x.length }[event.key];
    if (move) { show(at + move); event.preventDefault(); } else if (event.key === "Escape") hide();
  });
  chart.dataset.ready = "yes";
}));
window.starters.at(-1)(document);
