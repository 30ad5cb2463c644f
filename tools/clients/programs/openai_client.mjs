// openai for node: chat completions, streams, a tool, a schema, and Responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.env.SERVER_URL + "/v1", apiKey: "none", maxRetries: 0 });
const sum = { model: "demo", temperature: 0, messages: [{ role: "user", content: "What is 12 + 30?" }] };
const whole = await client.chat.completions.create(sum);
assert.match(whole.choices[0].message.content, /42/);

let text = "";
for await (const chunk of await client.chat.completions.create({ ...sum, stream: true })) {
    text += chunk.choices[0]?.delta?.content ?? "";
}
assert.equal(text, whole.choices[0].message.content);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tool = { name: "get_weather", description: "Get the weather in a city.", parameters };
const cities = [];
const runner = client.chat.completions.runTools({
    model: "demo",
    temperature: 0,
    messages: [{ role: "user", content: "What is the weather in Rome?" }],
    tools: [
        {
            type: "function",
            function: {
                ...tool,
                parse: JSON.parse,
                function: ({ city }) => {
                    cities.push(city);
                    return '{"temperature": 18, "sky": "sunny"}';
                },
            },
        },
    ],
});
assert.match(await runner.finalContent(), /18/);
assert.deepEqual(cities, ["Rome"]);

const stream = client.responses.stream({ model: "demo", temperature: 0, input: "What is 12 + 30?" });
const kinds = [];
for await (const event of stream) kinds.push(event.type);
assert.equal((await stream.finalResponse()).output_text, text);
assert.equal(kinds.at(-1), "response.completed");
await assert.rejects(client.models.retrieve("unknown"), OpenAI.NotFoundError);
