"use strict";
{
  const main = document.querySelector("main");
  const line = main.querySelector("header").appendChild(document.createElement("p"));
  const button = document.createElement("button");
  const told = document.createElement("span");
  line.className = "live";
  line.id = "live";
  button.type = "button";
  button.textContent = "Pause";
  line.append(button, told);
  let [version, paused, waiting] = [main.dataset.version, false, null];
  const clock = () => new Date().toLocaleTimeString();
  let seen = clock();
  told.textContent = `Follows the run; as of ${seen}.`;

  // What each part was made from: a part that has come to life no longer looks like it. At first it is not known, so
  // the first news replaces all of them.
  const source = new Map();
  const parts = (root) => [...root.children].filter((part) => part.tagName !== "FOOTER");
  const key = (part) => part.id || part.tagName;
  const parse = (text) => new DOMParser().parseFromString(text, "text/html").querySelector("main");

  // A part in use is left alone until it is not.
  const inUse = (part) => part.querySelector(".tip:not([hidden])") || part.contains(document.activeElement);

  const put = (fresh) => {
    let [before, left] = [null, false];
    for (const part of parts(fresh)) {
      const old = parts(main).find((each) => key(each) === key(part));
      if (old && part.tagName === "HEADER") {
        const [was, is] = [old, part].map((each) => each.querySelector("h1"));
        if (was.outerHTML !== is.outerHTML) was.replaceWith(document.importNode(is, true));
      } else if (!old || source.get(key(part)) !== part.outerHTML) {
        if (old && inUse(old)) { left = true; before = old; continue; }
        const made = document.importNode(part, true);
        source.set(key(part), part.outerHTML);
        if (old) {
          const open = old.querySelector("details")?.open;
          if (open) made.querySelector("details").open = true;
          old.replaceWith(made);
        } else if (before) before.after(made);
        for (const start of window.starters) start(made);
        before = made;
        continue;
      }
      before = old || before;
    }
    const there = new Set(parts(fresh).map(key));
    for (const part of parts(main)) if (!there.has(key(part)) && !inUse(part)) part.remove();
    return left;
  };

  const look = async () => {
    if (!paused && !document.hidden) {
      try {
        const answer = await fetch(`${location.pathname}?after=${encodeURIComponent(version)}`, { cache: "no-store" });
        if (answer.status === 200) {
          waiting = parse(await answer.text());
          version = waiting.dataset.version;
        }
        if (waiting && !put(waiting)) waiting = null;
        seen = clock();
        const held = waiting ? " A part you are using is updated when you leave it." : "";
        told.textContent = `Follows the run; as of ${seen}.${held}`;
      } catch {
        told.textContent = `No answer: freescale report has ended. This is the state of ${seen}.`;
      }
    }
    setTimeout(look, 2000);
  };
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Go on" : "Pause";
    told.textContent = paused ? `Paused; as of ${seen}.` : `Follows the run; as of ${seen}.`;
  });
  setTimeout(look, 2000);
}
