# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recordings as Parquet: DuckDB reads them from the file system, ClickHouse from an S3-compatible store (moto)."""

import json
import os
import socket
import subprocess
import sys
import time

from processes import START_S, free_ports

BUCKET = "fleet"
# The store takes any key.
KEY = "made-up"


def export(processes, whylate, recordings, directory):
    """Exports recordings one after another, until the run ends. Returns how many seconds that took."""
    began = time.monotonic()
    for recording in recordings:
        if processes.have_ended:
            break
        command = [whylate, "export", recording, "--parquet", directory, "--partition"]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=300)
    return time.monotonic() - began


def files(directory):
    for root, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(root, name)
            yield os.path.relpath(path, directory), path


class ObjectStore:
    """An S3-compatible store on the loopback interface, with a bucket."""

    def __init__(self, processes, log):
        import boto3
        from botocore.config import Config

        port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{port}"
        self.log = open(log, "w")
        server = os.path.join(os.path.dirname(sys.executable), "moto_server")
        processes.start([server, "-H", "127.0.0.1", "-p", str(port)], stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise RuntimeError("the object store does not start") from None
                time.sleep(0.2)
        self.client = boto3.client(
            "s3", endpoint_url=self.url, aws_access_key_id=KEY, aws_secret_access_key=KEY, region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, proxies={}),
        )
        self.client.create_bucket(Bucket=BUCKET)

    def put(self, directory):
        """Copies a directory. Returns the numbers of objects and bytes."""
        objects = size = 0
        for key, path in files(directory):
            with open(path, "rb") as file:
                body = file.read()
            self.client.put_object(Bucket=BUCKET, Key=key, Body=body)
            objects, size = objects + 1, size + len(body)
        return objects, size


class DuckDb:
    name = "DuckDB"

    def __init__(self, directory):
        import duckdb

        self.connection = duckdb.connect()
        # Results do not depend on the machine's time zone.
        self.connection.execute("SET TimeZone = 'Asia/Kolkata'")
        self.replaced = ("'fleet.parquet/", f"'{directory}/")

    def rows(self, query):
        result = self.connection.execute(query)
        names = [column[0] for column in result.description]
        return [dict(zip(names, row)) for row in result.fetchall()]


class ClickHouse:
    name = "ClickHouse"

    def __init__(self, store):
        import chdb.session

        self.session = chdb.session.Session()
        url = f"'{store.url}/{BUCKET}/"
        self.replaced = ("'https://fleet.s3.amazonaws.com/", url)
        self.key = ("parquet', 'Parquet'", f"parquet', '{KEY}', '{KEY}', 'Parquet'")

    def rows(self, query):
        return json.loads(str(self.session.query(query.replace(*self.key), "JSON")))["data"]
