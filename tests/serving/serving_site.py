"""Servers in tests: real processes, and requests to them, of tables and by hand."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa

from girih.data.decode.columns import is_list
from girih.serving.signature import LENGTHS
from girih.serving.tensors import NUMPY, RequestTensor, from_json

START_S = 120
DATATYPES = {dtype: name for name, dtype in NUMPY.items()}


def tensors_of(table):
    """The tensors of a table of Arrow as :class:`girih.serving.reading.RequestReader` takes them."""
    found = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks()
        if is_list(array.type):
            lengths = array.value_lengths().fill_null(0).to_numpy().astype(np.int32)
            found[name + LENGTHS] = RequestTensor(name + LENGTHS, "INT32", (len(lengths),), lengths)
            array = array.flatten()
        if pa.types.is_string(array.type):
            found[name] = from_json(name, "BYTES", (len(array),), array.to_pylist())
        else:
            datatype = DATATYPES[np.dtype(array.type.to_pandas_dtype())]
            values = array if array.null_count else array.to_numpy()
            found[name] = RequestTensor(name, datatype, (len(array),), values)
    return found


def inputs_of(table):
    """The same as JSON has them."""
    found = []
    for tensor in tensors_of(table).values():
        data = tensor.values.tolist()  # None where a value is missing
        described = {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
        found.append(described | {"data": data})
    return found


class Site:
    """A server as a process of its own.

    Attributes:
        url: HOST:PORT. name: of the model.
    """

    def __init__(self, *words, environment=None):
        command = [sys.executable, "-m", "girih", "serve", *map(str, words), "--port", "0"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | (environment or {}),
        )
        self.errors = []
        self._reader = threading.Thread(target=lambda: self.errors.extend(self.process.stderr), daemon=True)
        self._reader.start()
        watchdog = threading.Timer(START_S, self.process.kill)
        watchdog.start()
        line = self.process.stdout.readline()
        watchdog.cancel()
        assert line.startswith("serving "), (line, self.errors)
        self.name = line.split()[1]
        self.url = line.split()[3].strip(",").removeprefix("http://")

    def ask(self, method, path, body=None, headers=None):
        """(status, headers, body) of a request."""
        connection = http.client.HTTPConnection(self.url, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.headers, response.read()

    def get(self, path):
        """(status, JSON)."""
        status, _, body = self.ask("GET", path)
        return status, json.loads(body)

    def infer(self, content, headers=None):
        """(status, JSON) of a request for predictions; ``content`` is what JSON is made of, or bytes."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        status, _, found = self.ask("POST", f"/v2/models/{self.name}/infer", body, headers)
        return status, json.loads(found)

    def stop(self, number=signal.SIGTERM):
        """Ends it by a signal; returns its status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        self._reader.join(timeout=10)
        return status

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self._reader.join(timeout=10)
        self.process.stderr.close()
