# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs each query of a document on a recording and its tables, and prints the rows of each as a line of JSON."""
import json
import re
import sys

import duckdb

document, recording, folder = sys.argv[1:]
duckdb.sql("SET TimeZone = 'Asia/Kolkata'")
with open(document) as file:
    queries = re.findall(r"```sql\n(.*?)```", file.read(), re.S)
for query in queries:
    query = query.replace("'web1.whylate'", f"'{recording}'").replace("'web1.parquet/", f"'{folder}/")
    rows = duckdb.sql(query).fetchall()
    print(json.dumps(rows, default=str))
