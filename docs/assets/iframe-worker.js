// A page that is opened from disk gets no Worker (browsers refuse the script of another origin), so that the search would be
// off. Run the search in a hidden frame then: the same script, with messages passed by hand. Zensical loads its own version of
// this file from a CDN unless the site has one whose name contains "iframe-worker".
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      // Both sides change what they receive, so each gets a copy, as from a real Worker.
      inside.postMessage = (data) => this.answer(structuredClone(data));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        const waiting = this.waiting;
        this.waiting = null;
        waiting.forEach((data) => this.postMessage(data));
      };
      script.onerror = (event) => this.onerror?.(event);
      inside.document.body.append(script);
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data: structuredClone(data) }));
    }

    answer(data) {
      setTimeout(() => this.onmessage?.({ data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
