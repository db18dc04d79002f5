# SPDX-License-Identifier: MIT OR Apache-2.0
"""The queries of docs/fleet.md: each is a block of code that begins with a comment `ENGINE: NAME`."""

import re


class Page:
    def __init__(self, path):
        with open(path) as file:
            blocks = re.findall(r"^```(?:promql|sql)\n(?:#|--) (\w+): (\w+)\n(.*?)^```", file.read(), re.M | re.S)
        self.queries = {(engine, name): query.strip().rstrip(";") for engine, name, query in blocks}
        self.executed = set()

    def query(self, engine, name, *replaced):
        """Returns a query with the values of this run. Fails if the query lacks a text to replace."""
        self.executed.add((engine, name))
        query = self.queries[engine, name]
        for text, by in replaced:
            if text not in query:
                raise RuntimeError(f"the query {engine}: {name} has no {text}")
            query = query.replace(text, by)
        return query

    def names(self, engine):
        return [name for of, name in self.queries if of == engine]
