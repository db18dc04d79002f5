# SPDX-License-Identifier: MIT OR Apache-2.0
"""Whether a page is HTML: parses it as the standard says, and takes no parse error; ids are there once, and what refers to
one finds it; tables have rows of equal length; each control has a name."""

import collections
import sys

import html5lib

text = open(sys.argv[1], encoding="utf-8").read()
parser = html5lib.HTMLParser(namespaceHTMLElements=False)
document = parser.parse(text)
problems = [f"{place}: {html5lib.constants.E.get(code, code) % known}" for place, code, known in parser.errors]

ids = collections.Counter(of.get("id") for of in document.iter() if of.get("id"))
problems += [f"the id {name} is there {count} times" for name, count in ids.items() if count > 1]

known = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "h1", "h2", "h3", "h4", "p", "b", "small",
         "code", "pre", "details", "summary", "dl", "dt", "dd", "div", "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td",
         "button", "input", "label", "output", "noscript", "script"}
for of in document.iter():
    if not isinstance(of.tag, str):
        continue
    name = of.tag.rsplit("}", 1)[-1]
    if "svg" not in of.tag and name not in known:
        problems.append(f"<{name}> is no element that this page has")
    if any(attribute.startswith("on") or attribute == "style" for attribute in of.attrib):
        problems.append(f"<{name}> has {sorted(of.attrib)}")
    if name == "dl" and any(child.tag != "div" for child in of):
        problems.append("a list of terms has something else in it")
    if name in ("ul", "ol") and any(child.tag != "li" for child in of):
        problems.append(f"a list has {[child.tag for child in of]}")
    if name == "table":
        columns = len(of.find("thead").find("tr"))
        for row in of.find("tbody"):
            width = sum(int(cell.get("colspan", 1)) for cell in row)
            if width != columns:
                problems.append(f"the table {of.get('id') or of.get('class')} has a row of {width} cells under {columns} headings")
    if name == "button" and not "".join(of.itertext()).strip():
        problems.append("a button says nothing")
    if name.endswith("svg") and not (of.get("aria-label") or of.get("aria-hidden")):
        problems.append("a picture says nothing")

print("\n".join(problems))
sys.exit(1 if problems else 0)
