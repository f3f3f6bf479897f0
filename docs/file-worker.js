// A page that is opened from a file may start no worker, and the search is one. So there it runs in
// a hidden frame instead, which is given what the search asks a worker for.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.ready = new Promise(resolve => {
        const insert = () => {
          document.body.append(this.frame)
          const inside = this.frame.contentWindow
          inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
          inside.importScripts = (...urls) => urls.reduce((before, next) => before.then(() => load(next)), Promise.resolve())
          const load = address => new Promise((loaded, failed) => {
            const script = inside.document.createElement("script")
            script.src = new URL(address, document.baseURI).href
            script.onload = loaded
            script.onerror = failed
            inside.document.head.append(script)
          })
          load(url).then(() => resolve(inside))
        }
        document.body ? insert() : addEventListener("DOMContentLoaded", insert)
      })
    }

    postMessage(data) {
      this.ready.then(inside => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
