"""Where to look when a class of scenarios fails: one line for each, shown with the failure."""

from __future__ import annotations

from types import MappingProxyType

HINTS = MappingProxyType(
    {
        "TestBackend": "the backend's `status`, `supports` and `load`: which checks come before the engine sees the"
        " file, and which options are accepted without having an effect",
        "TestBadDumps": "the import of a payload: every length is checked against the file before it is used, and the"
        " sequence is filled only when all of it has been read",
        "TestBeam": "the fork and drop scenarios first: beams are forks of one prompt; then the rows of a batch in"
        " which several sequences ask for logits",
        "TestChat": "the decode, truncate and cut scenarios first: a chat makes its cache follow the messages with"
        " nothing else. If they hold, the chat template and the vocabulary",
        "TestChatPrograms": "the script that is printed: run it, and look at its last call; then the truncate, cut,"
        " fork and dump scenarios, of which chats are made",
        "TestClose": "`close` and what outlives it: contexts and models that are called after it, threads of the"
        " engine, and finalizers that run when the interpreter is already going down",
        "TestCompletions": "the fork scenarios first: the prompt is decoded once and forked for each answer; then the"
        " rows of a batch of many sequences",
        "TestConstraints": "`Vocab.token_bytes`, `encode` and `eog_ids`, of which grammars are made; then the rows of a"
        " batch in which all tokens ask for logits: what a constraint forces is decoded ahead",
        "TestContextDumps": "the fork scenarios and those of dumps first; then what a restore makes of positions that"
        " sequences share: a fork, and what comes after it",
        "TestCut": "the rotation of keys that move (direction, frequencies, pairs side by side or half a head apart),"
        " and whether cells that a fork shares are copied before they are rotated",
        "TestDeclarations": "what the context declares as edit level and capabilities, and whether a call beyond it"
        " raises before anything is changed",
        "TestDecode": "the attention mask and positions across chunks and sequences, and the order in which rows are"
        " gathered: an error near 1 is a wrong position or a wrong neighbour, one near the tolerance is precision",
        "TestDecodeLimits": "the count of free positions: where `n_ctx` and `n_batch` are checked, and what a refused"
        " batch has already written",
        "TestDecodeRefusals": "the order of check, compute and exchange in `decode`: nothing may be kept of a batch of"
        " which any part is refused",
        "TestDeviceSampling": "the decode scenarios first: `decode_top` is the same but for what it gives of a row. If"
        " those hold, ties (the lower id comes first), and buffers that are handed out and used again",
        "TestDrop": "what is freed with a sequence: cells that another sequence still shares must stay",
        "TestDumpRestore": "export and import of keys and values: layout, token order, positions after edits; and the"
        " payload format's name, which must change with the layout",
        "TestDumpParts": "the dump scenarios first: the parts are the bytes of a dump. Then what each part is made of:"
        " the storage of a sequence may be moved, and never changed, while other sequences go on",
        "TestEmbeddingInput": "the decode scenarios first: a row replaces a token's row of the embedding table. Then"
        " the order of rows and tokens in a batch, and the rows that are kept to be decoded again",
        "TestEmbeddings": "the decode scenarios first: `embed` differs from `decode` in its output only. If they hold,"
        " the layer of the hidden states: after the last norm, before the output matrix",
        "TestErrors": "the checks of the call: what raises knows the sequence, and passes it as `seq_id`. `ContextBase`"
        " does so for all that it checks",
        "TestFailures": "the order of compute and exchange: lengths, tokens and cells change last, in one step, and"
        " what is read from the batch is read before",
        "TestFork": "storage that two sequences share: who copies it, and when, once either side writes; and the bound"
        " `end`",
        "TestGeneration": "the rows that `decode` returns: their order, and whether they stay until the next"
        " call; then the vocabulary's bytes and its end-of-generation tokens",
        "TestMropePositions": "the embedding scenarios first; then the M-RoPE position of the next token: the highest"
        " so far plus one, in time, height and width, also after an edit or a restore",
        "TestHostileDumps": "every number that is read from a dump: it is compared with the bytes that are there before"
        " it sizes a buffer, a loop or an index",
        "TestHostileSessions": "`restore` of the context first: what it raises for an inner dump, and what it leaves;"
        " all else is above the line",
        "TestMeaning": "the edits: what was deleted is still attended to. If they hold on the random models, the"
        " numbers on this file's weight type",
        "TestModelBased": "the script that is printed: run it, and look at its last call; what else fails above names"
        " the clause more closely",
        "TestNumbers": "`precision` in the fixtures class: is it what the engine computes in? Then norms, biases, rope"
        " base and factors, tied output, and the KV type that was asked for",
        "TestOracle": "the truncate, fork and drop scenarios first: an oracle's rollback is made of them",
        "TestRestoreParts": "the scenarios of bad dumps first; then the order of a restore: what comes is checked and"
        " put aside, and the sequence is replaced when the checksum has been compared",
        "TestSampling": "the rows that `decode` returns: values that are not finite, and rows that a later call writes"
        " into; then `dump` and `restore`, which carry the sampler's state",
        "TestSession": "the truncate, cut and dump scenarios first; then `tokens` and `length`, which a session trusts",
        "TestSessionPrograms": "the script that is printed: run it, and look at its last call; then the truncate, cut,"
        " fork and dump scenarios, of which sessions are made",
        "TestSizes": "`new_context`: sizes and KV types that are rounded or replaced, instead of being taken or"
        " refused",
        "TestBidirectionalBlocks": "the decode scenarios first; then the mask: each token of a block attends to the"
        " whole block and to nothing after it, and whole blocks are decoded again",
        "TestSpeculation": "the truncate scenarios first; then the rows of a batch in which all tokens ask for logits:"
        " their order, and that each sees the tokens before it and none after",
        "TestThreads": "the lock of a context, which is taken without waiting; and buffers that contexts of one model"
        " share",
        "TestTools": "the chat and constraint scenarios first: a call is an answer under a grammar, and its result is"
        " one more message",
        "TestTruncate": "the tail that is forgotten: does the mask still see it, are its positions free, and is a cell"
        " that a fork shares left in place",
        "TestVocabulary": "the tokenizer: the file's pre-tokenization rule, merges, byte fallback, the leading space,"
        " and control tokens, which plain text must never become",
    }
)
"""By class name."""
