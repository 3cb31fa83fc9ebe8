// Python in a worker, for "Will it fit?": it loads Pyodide and this package from our own host (tools/browser_python.py puts
// them there), and answers with tools/fit/bridge.py. Of several questions only the newest is answered: Python works in small
// steps, and between two of them this file looks whether another question has come.
import { loadPyodide } from "./python/pyodide.mjs";

const here = new URL("./python/", import.meta.url).href;

async function get(name) {
  const answer = await fetch(here + name);
  if (!answer.ok) throw new Error(`${name} could not be loaded (${answer.status})`);
  return answer.arrayBuffer();
}

// Pyodide waits for ever for a file that is not there, so all of them are looked for while it loads.
const there = (name) => fetch(here + name, { method: "HEAD" }).then((answer) => {
  if (!answer.ok) throw new Error(`${name} could not be loaded (${answer.status})`);
});
const stop = (error) => postMessage({ failed: String(error?.message || error).trim().split("\n").pop() });

async function start() {
  const files = Promise.all(["pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"].map(there));
  const loading = loadPyodide({ indexURL: here, lockFileURL: `${here}lock.json` });
  const [packages, python] = await Promise.all([get("packages.zip"), loading, files]);
  python.unpackArchive(packages, "zip");
  python.runPython("import sys; sys.setrecursionlimit(5000)\nfrom tools.fit import stub\nstub.install()\nfrom tools.fit import bridge");
  return python.globals.get("bridge").steps;
}

const call = start();
call.then(() => postMessage({ ready: true }), stop);
addEventListener("unhandledrejection", ({ reason }) => stop(reason)); // of a file that came in part
const listen = () => new Promise((then) => { setTimeout(then); }); // messages come in meanwhile
let newest = 0;
addEventListener("message", async ({ data: { id, job, given } }) => {
  newest = id;
  const steps = await call;
  if (!job || newest !== id) return; // without a job it only ends what is running
  const work = steps(job, JSON.stringify(given));
  try {
    for (let heard = performance.now(); newest === id;) {
      const { done, value } = work.next();
      if (done) return postMessage({ id, found: value });
      if (performance.now() - heard < 40) continue;
      postMessage({ id, step: JSON.parse(value) });
      await listen();
      heard = performance.now();
    }
  } catch (error) {
    postMessage({ id, failed: String(error.message || error).trim().split("\n").pop() });
  } finally {
    work.destroy();
  }
});
