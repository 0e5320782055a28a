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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import numpy as np
import precast
import uvicorn
from fastapi import FastAPI, HTTPException, Request
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
