"""Answer several users on one event loop: an engine batches their requests and computes common prefixes once."""

import asyncio

import slm_core as slm


async def main(questions: list[str]) -> None:
    with slm.load(slm.demo_model_path()).engine(n_ctx=4096) as engine:
        streams = [engine.submit([{"role": "user", "content": q}], slm.Sampling(temperature=0)) for q in questions]
        print(*[answer.text for answer in await asyncio.gather(*(stream.arun() for stream in streams))], sep="\n")


asyncio.run(main(["What is 12 + 30?", "Spell the word banana."]))
