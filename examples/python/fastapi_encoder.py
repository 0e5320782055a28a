"""A service for sentence vectors: FastAPI and compiled MiniLM. Calls do not stop the event loop.

```console
$ PRECAST_STORE=artifacts uvicorn fastapi_encoder:app     # serve
$ python fastapi_encoder.py --store artifacts             # serve, ask it many questions at once, compare with eager
```
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import precast
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, Field
from sentence import SentenceEncoder, check, eager, sentences, store


class Question(BaseModel):
    """The sentences of a request."""

    sentences: list[str] = Field(min_length=1, max_length=64)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Loads the model before the first request, and closes it after the last."""
    # `wait`: a request that finds no free instance for this long is refused, so that a queue can't grow for ever.
    encoder = SentenceEncoder(os.environ.get("PRECAST_STORE", "artifacts"), instances=2, wait=5.0)
    app.state.encoder = encoder
    app.state.registry = CollectorRegistry()
    app.state.registry.register(Calls(encoder.model))
    yield
    encoder.model.close()


app = FastAPI(lifespan=lifespan)


@app.post("/encode")
async def encode(question: Question, request: Request) -> list[list[float]]:
    """Returns a vector of length 1 for each sentence."""
    encoder: SentenceEncoder = request.app.state.encoder
    try:
        return (await encoder.aencode(question.sentences)).tolist()
    except precast.BadInput as error:
        raise HTTPException(422, str(error)) from error
    except precast.Busy as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from error


@app.get("/stats")
async def stats(request: Request) -> dict[str, object]:
    """Returns the counts of calls."""
    found: dict[str, object] = request.app.state.encoder.model.stats()
    return found


@app.get("/health")
async def health(request: Request) -> dict[str, int]:
    """Answers once the model is loaded, while its devices answer. A broken device stays so: start the process again."""
    devices = request.app.state.encoder.model.stats()["devices"]
    broken = [f"{one['device']}: {one['broken']}" for one in devices if one["broken"]]
    if broken:
        raise HTTPException(503, "; ".join(broken))
    return {"in_flight": sum(one["in_flight"] for one in devices)}


class Calls(Collector):
    """The counts of calls for Prometheus, by module, bucket and the code that answered."""

    def __init__(self, model: precast.Model) -> None:
        self.model = model

    def collect(self) -> Iterator[Metric]:
        labels = ["module", "device", "bucket", "runner"]
        calls = CounterMetricFamily("precast_calls", "Calls by their end", labels=[*labels, "end"])
        seconds = GaugeMetricFamily("precast_call_seconds", "Moving mean of a call", labels=labels)
        counts: Counter[tuple[str, ...]] = Counter()
        means = {}
        for module in self.model.stats()["modules"]:
            for bucket in module["buckets"]:
                sizes = " ".join(f"{dim}={size}" for dim, size in bucket["bucket"].items())
                # Two programs of one bucket may have one runner: eager for every size, and in place of an artifact.
                names = (module["module"], module["device"], sizes, bucket["runner"])
                counts.update({(*names, end): bucket[end] for end in ("exact", "padded", "failed")})
                if bucket["mean_seconds"] is not None:
                    means[names] = bucket["mean_seconds"]
        for names, count in counts.items():
            calls.add_metric(names, count)
        for names, mean in means.items():
            seconds.add_metric(names, mean)
        yield calls
        yield seconds


@app.get("/metrics")
async def metrics(request: Request) -> Response:
    """Returns the counts of calls as Prometheus reads them."""
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)


async def ask(texts: list[str]) -> np.ndarray:
    """Serves, asks for each sentence several times at once, and returns a vector for each."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
        begun = time.perf_counter()
        asked = [client.post("/encode", json={"sentences": [text]}) for text in texts * 10]
        answers = await asyncio.gather(*asked)
        seconds = time.perf_counter() - begun
        assert {answer.status_code for answer in answers} == {200}
        print(f"{len(answers)} requests at once: {len(answers) / seconds:.0f} a second")
        assert (await client.post("/encode", json={"sentences": []})).status_code == 422
        print(f"stats: {(await client.get('/stats')).json()}")
        assert (await client.get("/health")).json() == {"in_flight": 0}
        counts = [
            line for line in (await client.get("/metrics")).text.splitlines() if line.startswith("precast_calls_")
        ]
        made = sum(
            float(line.rpartition(" ")[2]) for line in counts if 'end="failed"' not in line and "_created" not in line
        )
        assert made == len(answers), counts
    server.should_exit = True
    await serving
    vectors = np.array([answer.json()[0] for answer in answers], np.float32)
    # The answer to a sentence is the same every time.
    assert np.abs(vectors.reshape(10, len(texts), -1) - vectors[: len(texts)]).max() < 1e-5
    return vectors[: len(texts)]


def main() -> None:
    os.environ["PRECAST_STORE"] = str(store())
    texts = sentences()
    vectors = asyncio.run(ask(texts))
    check(vectors, eager(SentenceEncoder(os.environ["PRECAST_STORE"]), texts))


if __name__ == "__main__":
    main()
