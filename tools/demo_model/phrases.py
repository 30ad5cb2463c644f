"""Paraphrases, kept apart from the code that uses them.

Only evaluation conversations use lists with the prefix `HELD_OUT_`.  Sentences are composed: opener + core + closer,
and most questions are a frame around a noun phrase ("Tell me {np}." with "my dog's name").  `{k}` is a kind of pet,
`{v}` the value of a fact, `{np}` a noun phrase, `{a}` and `{b}` two choices or operands.
"""

OPENERS = (
    "OK. ", "Now, ", "So, ", "Well, ", "Hey, ", "Pip, ", "Great. ", "Good. ", "Quick question: ", "Thanks. ", "Next: ",
    "Alright. ", "Hello! ", "Hi, ", "Please: ", "One more thing. ", "Another one: ", "Hmm. ", "Listen: ", "And now: ",
    # Words of the prompts that ask for a thought appear here too, where they ask for none.
    "Then: ", "And then: ", "First: ", "First, ", "I think so. ", "Let me think. ", "Before I go: ", "Step two: ",
    "Then, ", "OK then: ", "Good. Then: ", "So then, ", "Fine, ", "Fine. ", "Yes. ", "No. ", "Right. ", "OK, now: ",
    "OK, next: ", "Hello Pip. ", "Hey Pip, ", "Pip: ", "Good, next: ", "Nice. ", "I see. ", "Well: ", "A question: ",
    "Sorry, ", "Oh, ",
)  # fmt: skip
HELD_OUT_OPENERS = ("Good, now: ", "OK, Pip. ", "Well then, ")
CLOSERS = (
    " Please.", " Thanks!", " Thank you.", " Thanks.", " Please!", " That is all.", " Right?", " OK.", " Pip?",
    " I think.", " Is that OK?", " Good.", " Be quick.", " Thank you, Pip.",
)  # fmt: skip
HELD_OUT_CLOSERS = (" Thank you!", " OK?")

TELL = {
    "name": (
        "My name is {v}.", "They all call me {v}.", "Hello, I am {v}.", "I am {v}.", "I'm {v}.", "Call me {v}.",
        "You can call me {v}.", "People call me {v}.", "The name is {v}.", "My name's {v}.", "Please call me {v}.",
        "I am called {v}.", "Everybody calls me {v}.", "{v} is my name.", "It's me, {v}.", "My friends call me {v}.",
        "This is {v}.",
    ),
    "pet": (
        "My {k} is called {v}.", "I have a {k} called {v}.", "I have a {k} named {v}.", "My {k}'s name is {v}.",
        "I own a {k} called {v}.", "{v} is my {k}.", "We have a {k}, {v}.", "The name of my {k} is {v}.",
        "My {k} is named {v}.", "I have a {k} and its name is {v}.", "I call my {k} {v}.", "We call our {k} {v}.",
        "My {k}'s called {v}.", "I named my {k} {v}.", "My {k} has a name: {v}.", "My {k} is {v}.",
        "This is my {k} {v}.", "I got a {k} named {v}.", "{v} is the name of my {k}.",
    ),
    "colour": (
        "My favourite colour is {v}.", "I like {v} best.", "I love the colour {v}.", "The colour I like best is {v}.",
        "My favorite color is {v}.", "{v} is my favourite colour.", "I like {v} most.",
        "The colour I like most is {v}.", "I like the colour {v} best.", "My preferred colour is {v}.",
        "Of all colours I like {v} best.", "My favourite colour, that is {v}.", "The best colour is {v}.",
        "The colour {v} is the best.",
    ),
    "city": (
        "I live in {v}.", "My home is in {v}.", "I am from {v}.", "I'm living in {v}.", "My city is {v}.",
        "{v} is where I live.", "I'm from {v}.", "My home town is {v}.", "The city I live in is {v}.",
        "{v} is my city.", "I have a house in {v}.", "I live in the city of {v}.", "My town is called {v}.",
        "I am at home in {v}.", "My house is in {v}.",
    ),
    "number": (
        "My lucky number is {v}.", "My favourite number is {v}.", "{v} is my lucky number.", "My number is {v}.",
        "The number {v} is lucky for me.", "I always pick the number {v}.", "The number I like best is {v}.",
        "The number {v} brings me luck.", "{v} is my favourite number.", "I like the number {v} best.",
    ),
}  # fmt: skip
HELD_OUT_TELL = {
    "name": ("They call me {v}.", "My own name is {v}."),
    "pet": ("Our {k} is called {v}.", "My {k} has the name {v}."),
    "colour": ("The colour {v} is my favourite.", "Best of all I like {v}."),
    "city": ("Now I live in {v}.", "My town is {v}."),
    "number": ("The number {v} is my lucky number.", "I like {v} best as a number."),
}
CHANGE_OPENERS = (
    "No, wait. ",
    "Sorry, I was wrong. ",
    "Correction: ",
    "I changed my mind. ",
    "Actually, ",
    "From now on: ",
)

NOUN_PHRASES = {
    "name": ("my name", "my own name", "my first name"),
    "pet": ("my {k}'s name", "the name of my {k}", "the name of the {k} I have"),
    "colour": (
        "my favourite colour", "my favorite color", "the colour I like best", "the colour I like most",
        "my preferred colour",
    ),
    "city": ("my city", "my home town", "the city I live in", "the place where I live", "the city I am from"),
    "number": ("my lucky number", "my favourite number", "my number", "the number I like best",
    "the number I always pick"),
}  # fmt: skip
ASK_FRAMES = (
    "What is {np}?", "What is {np}?", "What's {np}?", "Tell me {np}.", "Can you tell me {np}?", "Do you know {np}?",
    "Do you remember {np}?", "Please tell me {np}.", "Remind me of {np}.", "Say {np}.", "I forgot {np}.",
    "I want to know {np}.", "And {np}?", "{np}?", "Please say {np}.", "Could you tell me {np}?",
    "What was {np} again?", "Do you recall {np}?", "I would like to know {np}.", "Would you tell me {np}?",
    "Name {np}.", "Let me know {np}.", "Can you say {np}?", "What is {np}, please?", "You know {np}, right?",
    "And what is {np}?", "Can you remember {np}?", "Could you remind me of {np}?", "What do you know about {np}?",
    "Please let me know {np}.", "And what about {np}?",
)  # fmt: skip
HELD_OUT_ASK_FRAMES = (
    "Please remind me of {np}.", "Do you still remember {np}?", "And what's {np}?", "Now tell me {np}.",
    "Can you remind me of {np}?", "I forgot {np}, what is it?",
)  # fmt: skip
ASK_DIRECT = {
    "name": (
        "Who am I?", "What am I called?", "How am I called?", "What do people call me?", "Do you know who I am?",
        "Tell me who I am.", "Do you remember who I am?", "What do my friends call me?", "What should you call me?",
    ),
    "pet": (
        "What is my {k} called?", "What's my {k} called?", "How is my {k} called?", "What did I call my {k}?",
        "What is the {k} called?", "Tell me what my {k} is called.", "Do you know what my {k} is called?",
        "What do I call my {k}?", "Do you remember what my {k} is called?", "What is my {k} named?", "Who is my {k}?",
    ),
    "colour": (
        "Which colour do I like best?", "What colour do I like most?", "Which colour is my favourite?",
        "Which colour do I like?", "What colour do I love?", "Tell me which colour I like best.",
        "Do you know which colour I like?", "Which is my favourite colour?", "What colour do I like best?",
        "Do you remember which colour I like best?",
    ),
    "city": (
        "Where do I live?", "Where am I living?", "Which city do I live in?", "In which city do I live?",
        "Where is my home?", "Where am I from?", "Do you know where I live?", "Tell me where I live.",
        "Do you remember where I live?", "Where is my house?", "What city do I live in?", "I forgot where I live.",
        "Can you tell me where I live?",
    ),
    "number": (
        "Which number is lucky for me?", "Which number do I like best?", "Which number brings me luck?",
        "Which number do I always pick?", "Tell me which number is lucky for me.", "What number do I like best?",
        "Do you know which number I like best?", "Which is my lucky number?", "Which number is my favourite?",
    ),
}  # fmt: skip
HELD_OUT_ASK_DIRECT = {
    "name": ("Can you tell me who I am?", "What do you call me?"),
    "pet": ("Can you tell me what my {k} is called?", "How do I call my {k}?"),
    "colour": ("What is the colour I like best?", "Can you tell me which colour I like best?"),
    "city": ("Please tell me where I live.", "In what city do I live?"),
    "number": ("What number is lucky for me?", "Do you remember which number is lucky for me?"),
}
KNOWN = {
    "name": "Your name is {v}.",
    "pet": "Your {k} is called {v}.",
    "colour": "Your favourite colour is {v}.",
    "city": "You live in {v}.",
    "number": "Your lucky number is {v}.",
}
UNKNOWN = {
    "name": "I don't know your name.",
    "pet": "I don't know your {k}'s name.",
    "colour": "I don't know your favourite colour.",
    "city": "I don't know where you live.",
    "number": "I don't know your lucky number.",
}
# An acknowledgement never repeats the fact: when the user's message is removed, nothing of the fact may remain.
ACKNOWLEDGE = {
    "name": "Nice to meet you!",
    "pet": "What a nice name!",
    "colour": "That is a lovely colour!",
    "city": "That is a nice place!",
    "number": "I will remember that number.",
}
ACKNOWLEDGE_MANY = "Thank you, I will remember that."

WHICH_FRAMES = (
    "Which is {np}, {a} or {b}?", "Is {np} {a} or {b}?", "What is {np}, {a} or {b}?", "{a} or {b}, which is {np}?",
    "Tell me {np}: {a} or {b}?", "Which one is {np}, {a} or {b}?", "What is {np}: {a} or {b}?", "{np}: {a} or {b}?",
    "Do you know {np}? Is it {a} or {b}?", "What's {np}? Is it {a} or {b}?", "{a} or {b}: what is {np}?",
    "Is it {a} or {b}, {np}?", "Which of {a} and {b} is {np}?",
)  # fmt: skip
HELD_OUT_WHICH_FRAMES = ("What is {np}? {a} or {b}?", "Which is {np}: {a} or {b}?", "Do you know {np}, {a} or {b}?")
WHICH_DIRECT = {
    "name": ("Am I {a} or {b}?", "Am I called {a} or {b}?", "Who am I, {a} or {b}?"),
    "pet": ("Is my {k} called {a} or {b}?", "What is my {k} called, {a} or {b}?", "Is my {k} {a} or {b}?"),
    "colour": (
        "Do I like {a} or {b} best?", "Which colour do I like best, {a} or {b}?", "Which do I like most, {a} or {b}?",
    ),
    "city": ("Do I live in {a} or {b}?", "Where do I live, in {a} or in {b}?", "Am I from {a} or {b}?"),
    "number": ("Which number is lucky for me, {a} or {b}?", "Which number do I like best, {a} or {b}?"),
}  # fmt: skip

JSON_VERBS = ("Give me", "Return", "Write", "Show me", "Print", "Send me", "I want", "Please give me", "Please write")
JSON_FACTS = (
    "what you know about me", "my facts", "everything you know about me", "all you know about me", "my data",
    "what I told you", "the facts about me", "all my facts",
)  # fmt: skip
JSON_FORMS = ("as JSON", "in JSON", "as a JSON object", "as one JSON object")
HELD_OUT_JSON_ALL = ("Put everything you know about me in JSON.", "Show me all I told you as JSON.")
JSON_KEYS = (
    "{verb} JSON with the keys {keys}.", "{verb} a JSON object with {keys}.", "Answer in JSON with the keys {keys}.",
    "{verb} a JSON object with the keys {keys}.", "{verb} {keys} as JSON.", "{verb} {keys} in JSON.",
    "Answer with a JSON object: {keys}.",
)  # fmt: skip
HELD_OUT_JSON_KEYS = ("Answer in JSON: {keys}.", "{verb} the keys {keys} as a JSON object.")

ARITHMETIC = (
    "What is {a} {o} {b}?", "What is {a} {o} {b}?", "{a} {o} {b} = ?", "{a} {o} {b}", "Compute {a} {o} {b}.",
    "Calculate {a} {o} {b}.", "How much is {a} {o} {b}?", "{a}{o}{b}", "{a} {o} {b}?", "What is {a} {w} {b}?",
    "How much is {a} {w} {b}?", "Tell me {a} {o} {b}.", "What's {a} {o} {b}?", "{a} {o} {b} =", "{a} {w} {b}?",
    "Can you compute {a} {o} {b}?", "What does {a} {o} {b} make?", "Solve {a} {o} {b}.",
)  # fmt: skip
HELD_OUT_ARITHMETIC = ("Please compute {a} {o} {b}.", "Can you tell me {a} {o} {b}?", "What's {a} {w} {b}?")
ADDITION = ("Add {a} and {b}.", "What is the sum of {a} and {b}?", "Please add {a} and {b}.", "Add {b} to {a}.")
SUBTRACTION = ("Subtract {b} from {a}.", "Take {b} from {a}.", "Take {b} away from {a}.")

SPELL = (
    "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Please spell {w}.", "Can you spell {w}?",
    'Spell "{w}".', "Spell {w} for me.", "How is {w} spelled?", "What are the letters of {w}?", "Spell: {w}",
    "Could you spell {w}?", "Spell it: {w}.", "Which letters are in {w}?", "Tell me how to spell {w}.",
    "I want you to spell {w}.", "Spell out {w}.",
)  # fmt: skip
HELD_OUT_SPELL = ("Please spell the word {w}.", "Can you spell {w} for me?", "Tell me the letters of {w}.")
REPEAT = (
    "Repeat: {w}", "Say {w}.", "Repeat after me: {w}", "Repeat the word {w}.", "Please say {w}.", "Echo {w}.",
    'Say "{w}".', "Repeat {w}.", "Please repeat {w}.", "Can you say {w}?", "Just say {w}.", "Say after me: {w}",
    "I say {w}, you say it too.", "Can you repeat {w}?", "Say the word {w}.", "Echo: {w}",
)  # fmt: skip
HELD_OUT_REPEAT = ("Please repeat: {w}", "Repeat {w} for me.", "Can you say {w} for me?")

WEATHER = (
    "What is the weather in {c}?", "How is the weather in {c}?", "What's the weather like in {c}?",
    "Tell me the weather in {c}.", "Is it nice in {c} today?", "Weather in {c}?", "I want to know the weather in {c}.",
    "What is the weather like in {c} today?", "How is the weather in {c} today?", "Is it raining in {c}?",
    "Check the weather in {c}.", "Please check the weather in {c}.", "What's the weather in {c} now?",
    "Can you tell me the weather in {c}?", "Is it warm in {c}?", "Is it cold in {c} now?", "And the weather in {c}?",
    "And in {c}, how is the weather?", "How warm is it in {c}?", "Does it rain in {c}?",
)  # fmt: skip
HELD_OUT_WEATHER = (
    "Please tell me the weather in {c}.",
    "Can you check the weather in {c}?",
    "How is the weather now in {c}?",
)
WEATHER_WITHOUT_TOOL = "I can't check the weather without a tool."

WHO_I_AM = "I am Pip, a tiny demo model."
CHAT = {
    "Hello! How can I help you?": (
        "Hello!", "Hi", "Hey there!", "Good morning!", "Hello", "Hi there!", "Good evening.", "Hello Pip!", "Hey!",
        "Hi!", "Hi Pip.", "Good day!", "Hello there.", "Hey Pip!", "Good afternoon!",
    ),
    WHO_I_AM: (
        "Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Introduce yourself.",
        "What's your name?", "Are you Pip?", "Tell me your name.", "Who am I talking to?",
        "Please introduce yourself.", "What kind of model are you?", "Are you a robot?", "Do you have a name?",
        "Can you tell me who you are?", "What should I call you?", "Tell me who you are.", "And who are you?",
    ),
    "I am fine, thank you!": (
        "How are you?", "How are you today?", "How is it going?", "How do you do?", "Are you fine?",
        "How do you feel?", "How are things?", "And how are you?",
    ),
    "You're welcome!": (
        "Thanks!", "Thank you.", "Thank you very much!", "Thanks a lot.", "Thank you so much.", "Many thanks!",
        "Great, thanks!", "Thanks, Pip!",
    ),
    "Goodbye!": ("Bye!", "Goodbye.", "See you later!", "Bye bye!", "Good night!", "See you.", "Goodbye, Pip!",
    "Bye Pip."),
    "I can remember facts, add and subtract, spell words, write JSON and call a weather tool.": (
        "What can you do?", "Help me.", "What can I ask you?", "How can you help me?", "What are you able to do?",
        "What are your skills?", "Tell me what you can do.", "Help!", "Can you help me?",
    ),
}  # fmt: skip
HELD_OUT_CHAT = {
    "Hello! How can I help you?": ("Hello, Pip!", "Hey, good morning!"),
    WHO_I_AM: ("Please tell me who you are.", "And what is your name?"),
    "I am fine, thank you!": ("How are you now?", "And how is it going?"),
    "You're welcome!": ("Many thanks, Pip!", "Great, thank you!"),
    "Goodbye!": ("Bye, see you later!", "Goodbye and good night!"),
    "I can remember facts, add and subtract, spell words, write JSON and call a weather tool.": (
        "Please tell me what you can do.", "And what can you do?",
    ),
}  # fmt: skip

# Frames of system prompts; {x} is an adjective.
SYSTEM = (
    "You are {x}.", "You are a {x} assistant.", "You are a {x} and {y} assistant.", "Be {x}.", "You are {x} and {y}.",
    "You are Pip.", "You are Pip, a {x} model.", "You are Pip, a tiny demo model.", "Answer briefly.", "Be brief.",
    "Keep your answers short.", "You are a {x} bot.", "You are my {x} friend.", "Answer in English.",
    "Be {x} and {y}.", "You are a helpful assistant.", "You are a {x} chat model.", "Give {x} answers.",
    "Always be {x}.", "Stay {x}.", "Your answers are {x}.", "You are a {x} assistant. Be {y}.", "You are Pip. Be {x}.",
    "Help the user.",
)  # fmt: skip
HELD_OUT_SYSTEM = ("You are Pip, a {x} assistant.", "You are {x}. Be {y}.", "Always give {x} answers.")
SYSTEM_NO_THINK = (
    "First read, then answer.", "Listen before you answer.", "Answer first.", "Read the question first.",
    "Answer at once.", "Answer before you are asked again.", "Then answer.", "Please answer step by step.",
    "Always answer.", "Answer, then stop.", "Answer without thinking.",
)  # fmt: skip
# A prompt that asks for a thought: start + verb + end.
THINK_STARTS = ("", "", "Please ", "Always ", "First ", "You should ", "You must ", "Please always ", "Now ", "You ")
THINK_VERBS = (
    "think", "think first", "think step by step", "think a moment", "think about it", "think carefully",
    "think about the question", "think briefly",
)  # fmt: skip
THINK_ENDS = (
    ".", ".", " before you answer.", ", then answer.", " before you speak.", " and then answer.", " before answering.",
    " before every answer.",
)  # fmt: skip
HELD_OUT_SYSTEM_THINK = ("Always think first.", "Please think step by step.")
SYSTEM_TOOLS = (
    "You can call tools.", "Use the tools when you need them.", "You have tools.", "Use a tool to answer.",
    "You are an assistant with tools.", "Call a function if needed.",
)  # fmt: skip
