"use strict";
// Browsers start no worker from a page on disk, and the theme's search is a worker. Opened from disk, run it in a hidden frame instead.
// The name of this file keeps the theme's plugin `offline` from loading such a script from another server.
(() => {
  if (location.protocol !== "file:") return;

  window.Worker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      document.body.append(this.#frame);
      const inner = this.#frame.contentWindow, page = inner.document;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...urls) => urls.reduce((before, each) => before.then(() => load(page, each)), Promise.resolve());
      this.#loaded = load(page, url);
    }

    postMessage(data) {
      this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }
  };

  function load(page, url) {
    return new Promise((done, failed) => {
      page.body.append(Object.assign(page.createElement("script"), { src: url, onload: done, onerror: failed }));
    });
  }
})();
