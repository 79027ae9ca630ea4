"""The token viewer's style sheet: light and dark, and told apart without colour too (underlines)."""

STYLE = """
:root{--bg:#f6f7f9;--card:#fff;--ink:#1c2430;--soft:#667085;--line:#e3e7ee;
--accepted:#c9ecd3;--correction:#ffd9b0;--bonus:#cfe0ff;--prefill:#e4e7ec;--rejected:#fde2e4;--tip:#1c2430;--tipink:#fff}
@media(prefers-color-scheme:dark){:root{--bg:#12161c;--card:#1b212a;--ink:#e6e9ee;--soft:#98a2b3;--line:#2d3542;
--accepted:#1f5136;--correction:#6d4317;--bonus:#264a86;--prefill:#3a4350;--rejected:#5f2830;--tip:#e6e9ee;--tipink:#12161c}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
header,main{max-width:1280px;margin:0 auto;padding:0 24px}
header{padding-top:28px}
h1{font-size:24px;margin:0 0 4px;letter-spacing:-.01em}
header p{margin:0 0 12px;color:var(--soft)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:6px 22px;margin:0 0 8px;padding:0;font-size:13px;color:var(--soft)}
.legend .tok{color:var(--ink);padding:2px 7px;border-radius:5px}
.hint{font-size:13px}
section{margin:26px 0 34px}
h2{font-size:16px;font-weight:600;margin:0 0 12px;display:flex;gap:10px;align-items:baseline}
h2 .number{flex:none;color:var(--card);background:var(--soft);border-radius:50%;width:24px;height:24px;text-align:center;
font-size:13px;line-height:24px}
.prompt{white-space:pre-wrap;overflow-wrap:anywhere}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px;align-items:start}
.card{background:var(--card);border:1px solid var(--line);border-radius:12px;padding:16px 18px;
box-shadow:0 1px 2px rgba(16,24,40,.05)}
h3{font-size:15px;margin:0}
small{color:var(--soft);font-weight:400;font-size:12.5px}
.figure{margin:4px 0 10px}
.figure b{font-size:22px;letter-spacing:-.02em}
.figure small{display:block}
.bar{display:flex;height:8px;border-radius:4px;overflow:hidden;margin:0 0 12px;gap:1px}
.bar i{display:block}
.text{white-space:pre-wrap;overflow-wrap:anywhere;font:14px/2 ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace}
.round{border-radius:5px;outline:1px solid var(--line);outline-offset:1px;margin-right:3px;
-webkit-box-decoration-break:clone;box-decoration-break:clone}
.round:hover{outline:2px solid var(--soft)}
.tok,.chip{position:relative;border-radius:3px;padding:2px 0}
.accepted{background:var(--accepted)}
.correction{background:var(--correction);text-decoration:underline dotted;text-underline-offset:4px}
.bonus{background:var(--bonus);text-decoration:underline;text-underline-offset:4px}
.prefill{background:var(--prefill)}
.rejected{background:var(--rejected);outline:1px dashed var(--soft);outline-offset:-1px;opacity:.85}
.alone{unicode-bidi:isolate}
.nl::before{content:"\\21b5";color:var(--soft);opacity:.7}
[data-tip]:hover::after{content:attr(data-tip);position:absolute;z-index:9;left:0;top:100%;margin-top:4px;white-space:pre;
background:var(--tip);color:var(--tipink);font:12px/1.5 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;
padding:6px 9px;border-radius:6px;pointer-events:none;text-decoration:none;display:inline-block}
.tok:hover,.chip:hover{filter:brightness(.94)}
details{margin-top:12px;border-top:1px solid var(--line);padding-top:8px}
summary{cursor:pointer;color:var(--soft);font-size:13px}
details ol{margin:8px 0 0;padding-left:34px;font:13px/2.1 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace}
details li::marker{color:var(--soft)}
.chip{padding:2px 5px;margin-right:3px;white-space:pre}
.arrow{color:var(--soft);margin:0 6px 0 3px}
@media print{.card{break-inside:avoid}}
"""
