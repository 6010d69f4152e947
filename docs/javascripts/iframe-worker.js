// Search in pages that are opened from a folder: browsers refuse workers of file: addresses, so that the search runs in a hidden frame.
// The name of this file tells Zensical that the site brings its own replacement of workers.
(() => {
  if (location.protocol !== "file:") return;

  window.Worker = class {
    constructor(address) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.srcdoc = "<!doctype html>";
      this.isReady = new Promise((ready, failed) => {
        this.frame.addEventListener("load", () => {
          const inside = this.frame.contentWindow;
          inside.postMessage = (data) => this.deliver(() => this.onmessage?.(new MessageEvent("message", { data })));
          const script = inside.document.createElement("script");
          script.src = new URL(address, location.href);
          script.addEventListener("load", ready);
          script.addEventListener("error", failed);
          inside.document.head.append(script);
        });
      });
      this.isReady.catch((error) => this.onerror?.(error));
      document.documentElement.append(this.frame);
    }

    postMessage(data) {
      this.isReady.then(() => {
        const inside = this.frame.contentWindow;
        this.deliver(() => inside?.dispatchEvent(new inside.MessageEvent("message", { data: structuredClone(data) })));
      });
    }

    deliver(call) {
      queueMicrotask(call);
    }

    terminate() {
      this.frame.remove();
    }
  };
})();
