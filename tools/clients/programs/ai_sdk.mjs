// The AI SDK: texts, streams, tools and objects, over OpenAI's and Anthropic's APIs.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const url = process.env.SERVER_URL + "/v1";
const openai = createOpenAICompatible({ name: "slm", baseURL: url, supportsStructuredOutputs: true });
const anthropic = createAnthropic({ baseURL: url, apiKey: "none" });
for (const model of [openai("demo"), anthropic("demo")]) {
    const sum = { model, prompt: "What is 12 + 30?", temperature: 0, maxOutputTokens: 100, maxRetries: 0 };
    const whole = await generateText(sum);
    assert.match(whole.text, /42/);
    let text = "";
    for await (const part of streamText(sum).textStream) text += part;
    assert.equal(text, whole.text);

    const cities = [];
    const get_weather = tool({
        description: "Get the weather in a city.",
        inputSchema: z.object({ city: z.string() }),
        execute: async ({ city }) => {
            cities.push(city);
            return { temperature: 18, sky: "sunny" };
        },
    });
    const weather = { ...sum, prompt: "What is the weather in Rome?", tools: { get_weather }, stopWhen: stepCountIs(3) };
    assert.match((await generateText(weather)).text, /18/);
    assert.deepEqual(cities, ["Rome"]);

    const person = z.object({ name: z.string(), age: z.number().int() });
    const asked = { ...sum, prompt: "Describe Ada, who is 36, as JSON.", output: Output.object({ schema: person }) };
    person.parse((await generateText(asked)).output);
}
