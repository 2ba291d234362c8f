// A page that was opened from disk may not start workers, and the search runs in one. Here it runs in a hidden frame
// instead. mkdocs-material would load such a script from a server of others (it looks for "iframe-worker" in the name).
if (location.protocol === "file:") {
  class FrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      const address = String(new URL(url, document.baseURI)).replaceAll("&", "&amp;").replaceAll('"', "&quot;");
      frame.hidden = true;
      frame.title = "search";
      // What the script inside posts comes out at its frame; it is set up before that script runs.
      const outwards = "postMessage = data => frameElement.dispatchEvent(new MessageEvent('answer', { data }))";
      frame.srcdoc = `<!doctype html><title>search</title><script>${outwards}</script><script src="${address}"></script>`;
      this.opened = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow), { once: true }));
      frame.addEventListener("answer", event => {
        const message = new MessageEvent("message", { data: event.data });
        this.onmessage?.(message);
        this.dispatchEvent(message);
      });
      document.body.append(frame);
      this.terminate = () => frame.remove();
    }

    postMessage(data) {
      this.opened.then(inside => inside.dispatchEvent(new MessageEvent("message", { data })));
    }
  }
  window.Worker = window.IFrameWorker = FrameWorker;
}
