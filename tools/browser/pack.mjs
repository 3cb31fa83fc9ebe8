// Compile Python's library and some packages for the browser: node pack.mjs FOLDER, where FOLDER/packages are unpacked
// packages and FOLDER/node_modules has Pyodide. It writes python_stdlib.zip and packages.zip into FOLDER, with byte code in place of source, because Python
// in a browser would otherwise compile what it imports each time the page is opened.
import fs from "node:fs";
import path from "node:path";

const folder = path.resolve(process.argv[2]);
const pyodide = path.join(folder, "node_modules", "pyodide");
const { loadPyodide } = await import(path.join(pyodide, "pyodide.mjs"));
const python = await loadPyodide({ indexURL: `${pyodide}/` });
python.FS.mkdirTree("/folder");
python.FS.mount(python.FS.filesystems.NODEFS, { root: folder }, "/folder");
python.FS.writeFile("/stdlib.zip", fs.readFileSync(path.join(pyodide, "python_stdlib.zip")));
python.runPython(fs.readFileSync(new URL("pack.py", import.meta.url), "utf8"));
