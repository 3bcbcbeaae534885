"""Facts about Penstock and its APIs, and small talk."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo_model.conversation import Conversation, Document, Message, Question, Split, ask, says
from demo_model.phrasing import Patterns, maybe_system

CURL = (
    "```bash\ncurl http://127.0.0.1:30000/v1/chat/completions -H 'Content-Type: application/json' \\\n"
    '  -d \'{"model": "default", "messages": [{"role": "user", "content": "Hello"}]}\'\n```'
)
OPENAI = (
    "```python\nfrom openai import OpenAI\n\n"
    'client = OpenAI(base_url="http://127.0.0.1:30000/v1", api_key="none")\n'
    'messages = [{"role": "user", "content": "Hello"}]\n'
    'reply = client.chat.completions.create(model="default", messages=messages)\n'
    "print(reply.choices[0].message.content)\n```"
)
ENGINE = (
    '```python\nfrom serve import SyncEngine\n\nengine = SyncEngine()\nprint(engine.generate("Hello")["text"])\n```'
)


@dataclass(frozen=True)
class Topic:
    """One fact, the questions about it, and the words that a correct answer contains."""

    asked: Patterns
    answer: str
    key: str


def _topic(train: str, held: str, answer: str, key: str) -> Topic:
    return Topic(Patterns(tuple(train.split("|")), tuple(held.split("|"))), answer, key)


TOPICS = (
    _topic(
        "What is Penstock?|I have never heard of Penstock.|What kind of software is Penstock?|Describe "
        "Penstock in a sentence.|Penstock?|Explain Penstock.|Tell me about Penstock.|What does Penstock "
        "do?|Define Penstock.",
        "Can you say in a sentence what Penstock is?|So what is this Penstock thing?",
        "Penstock is a language-model serving engine in one asyncio process, written in Python with torch.",
        "serving engine in one asyncio process",
    ),
    _topic(
        "Who are you?|Who is speaking?|Who am I talking with?|Say who you are.|What kind of model are you?|"
        "Are you a robot?|What are you?|What is your name?|Which model are you?|Introduce yourself.|Are "
        "you a "
        "human?",
        "With whom am I talking?|Tell me who you are.",
        "I am the small demo model that ships with Penstock. I know its arguments and a few simple things.",
        "demo model",
    ),
    _topic(
        "How do I call Penstock with curl?|Which curl command reaches the server?|I want to use curl.|How "
        "does a curl call to the server look?|Show me a curl example.|curl example|How do I use curl?|Give "
        "me "
        "a curl command.",
        "What does a request with curl look like?|Can I see how to reach the server by curl?",
        f"Send a chat request:\n{CURL}",
        "curl http://127.0.0.1:30000/v1/chat/completions",
    ),
    _topic(
        "How do I use the openai client?|How does the openai library work with Penstock?|I want to use the "
        "openai client.|openai client?|Show me an openai client example.|How do I call Penstock from the "
        "openai "
        "package?|openai python example|Can I use the OpenAI client?",
        "What does a call through the openai library look like?|Please show how the OpenAI client talks to Penstock.",
        f"Point the client at the server:\n{OPENAI}",
        'OpenAI(base_url="http://127.0.0.1:30000/v1"',
    ),
    _topic(
        "How do I use Penstock in Python?|I want to call the Engine in Python code.|How does a script use "
        "the engine?|Python engine?|Show the Engine class in use.|Show me the Python Engine.|How do I use "
        "the Engine?|Engine example|"
        "How do I run Penstock without a server?|Give me a Python example.",
        "What does the Engine look like in Python code?|Can I call the engine directly from a script?",
        f"Use the engine in your own process:\n{ENGINE}",
        "engine.generate(",
    ),
    _topic(
        "How do I start the server?|I want to start the server.|What is the command to start up?|Tell me "
        "how to start Penstock.|server start|How do I run Penstock?|Start command?|How can I launch the "
        "server?|"
        "Which command starts Penstock?",
        "What do I type to bring the server up?|Tell me how the server is started.",
        "Run python -m serve --model-path MODEL. Without a model it serves this demo model.",
        "python -m serve",
    ),
    _topic(
        "Which port does Penstock use?|What port is it?|Tell me the port.|Under which address can I reach "
        "the server?|What is the address of the server?|Where does the server listen?|"
        "Default port?",
        "On what port can I reach Penstock?|Tell me where the server listens.",
        "The server listens on http://127.0.0.1:30000; --host and --port change that.",
        "30000",
    ),
    _topic(
        "Which endpoints are there?|What routes are there?|Which routes can I call?|Tell me about the HTTP "
        "endpoints.|What endpoints does Penstock have?|List the endpoints.|Which API does "
        "it speak?",
        "What routes can I call on the server?|Tell me the endpoints.",
        "The main endpoints are /v1/chat/completions, /v1/completions, /v1/models, /generate and /health.",
        "/v1/chat/completions",
    ),
    _topic(
        "What can you do?|What are you able to do?|Which questions can you answer?|What are you good at?|"
        "Tell me what you can do.|What do you know?|How can you help me?|What can I ask you?|Help",
        "What kind of questions can you answer?|Tell me what you are able to do.",
        "I can explain server arguments, add and subtract, convert units, name capitals, fill JSON and call tools.",
        "explain server arguments",
    ),
    _topic(
        "What is prefix caching?|Tell me about the prefix cache.|Why is there a prefix cache?|Explain "
        "prefix caching.|What is the radix cache?|How does prefix reuse work?|What does the prefix "
        "cache do?",
        "Can you explain prefix reuse?|Tell me what the prefix cache is.",
        "Requests that begin alike share the KV pages of their common beginning, so it is computed only once.",
        "computed only once",
    ),
    _topic(
        "What is a page?|Explain pages of the KV cache.|Tell me about pages.|What does page mean in the "
        "cache?|What is a KV page?|What are pages in the cache?",
        "Can you explain what a page of the cache is?|Tell me what a KV page is.",
        "A page is the unit of the KV cache: room for the keys and values of a few tokens.",
        "unit of the KV cache",
    ),
    _topic(
        "What is chunked prefill?|Explain chunked prefill.|Tell me about chunked prefill.|What is the "
        "point of chunked prefill?|How does chunked prefill work?|Why are prompts cut into chunks?",
        "Can you explain chunked prefill?|Tell me the idea of chunked prefill.",
        "A long prompt is computed in pieces over several steps, so that other requests go on meanwhile.",
        "in pieces over several steps",
    ),
    _topic(
        "How do I switch thinking on?|Turn on thinking.|Tell me about the thinking switch.|Where do I set "
        "thinking?|I want you to think.|How do I enable thinking?|How do I make you think?|What is "
        "enable_thinking?",
        "Where is the thinking switch?|Tell me how thinking is turned on.",
        'Send "chat_template_kwargs": {"enable_thinking": true} with the request.',
        "enable_thinking",
    ),
    _topic(
        "How do I stream an answer?|I want the answer as a stream.|Tell me about streaming.|What do I send "
        "for streaming?|How do I get streaming?|Can you stream?|How does streaming work?",
        "What must I send to receive the answer piece by piece?|Tell me how to stream.",
        'Send "stream": true; the tokens then arrive as server-sent events.',
        '"stream": true',
    ),
    _topic(
        "How do I get JSON output?|I want valid JSON from the server.|Tell me about structured output.|"
        "What do I send to get JSON?|How do I force JSON?|Can I get structured output?|How do I use a JSON "
        "schema?",
        "What do I send so that the answer is valid JSON?|Tell me how structured output works.",
        'Send a JSON schema as "response_format"; the answer then follows it.',
        "response_format",
    ),
    _topic(
        "How large are you?|What is your number of parameters?|Tell me how large you are.|Are you small or "
        "big?|How many parameters do you have?|How big is this model?|What size are you?",
        "Tell me your number of parameters.|Are you a big model?",
        "I am tiny: about six million parameters.",
        "six million",
    ),
    _topic(
        "Hello|Hello model!|Hello there|Good day|Good afternoon|Hi demo|Hi|Hello!|Hi there!|Hey|Good "
        "morning|Good evening|Hi, how are you?",
        "Hello there, demo model!|Good afternoon!",
        "Hello! How can I help you?",
        "How can I help",
    ),
    _topic(
        "How are you?|How are you today?|Is everything all right?|Are you fine?|How do you do?|Are you "
        "well?|How is it going?",
        "How are you doing today?|Is everything fine with you?",
        "I am fine, thank you. How can I help you?",
        "I am fine",
    ),
    _topic(
        "Thanks|Thanks to you!|Many thanks.|Thank you very much.|Thank you|Thank you!|Thanks a lot!|Great, "
        "thanks.|Perfect, thank you.",
        "Many thanks to you!|Thank you so much!",
        "You are welcome!",
        "welcome",
    ),
    _topic(
        "Bye|Goodbye then!|See you tomorrow|See you soon!|Goodbye|Good bye!|See you|Good night|Bye bye",
        "Goodbye for now!|See you later!",
        "Goodbye!",
        "Goodbye",
    ),
)


def exchange(rng: Random, split: Split) -> tuple[str, str]:
    """Return one question about Penstock and its answer."""
    topic = rng.choice(TOPICS)
    return topic.asked.pick(rng, split), topic.answer


def document(rng: Random, split: Split) -> Document:
    """Return a document with one question about Penstock, or a greeting."""
    question, answer = exchange(rng, split)
    return ask(question, answer, "This is about Penstock or me." if rng.random() < 0.15 else None, maybe_system(rng))


def questions(rng: Random) -> list[Question]:
    """Return every topic in each held-out phrasing."""
    return [
        Question(Conversation((Message("user", text),)), says(topic.key), topic.answer)
        for topic in TOPICS
        for text in topic.asked.held
    ]
