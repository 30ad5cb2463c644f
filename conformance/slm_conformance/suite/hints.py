"""Where to look if a class of scenarios fails: one line per class, shown with the failure."""

from __future__ import annotations

from types import MappingProxyType

HINTS = MappingProxyType(
    {
        "TestAdapterDumps": "the dump scenarios first; then the adapters of the sequence: they are set before a dump is"
        " decoded again, and put back if a restore fails",
        "TestAdapterFiles": "the load of an adapter: the engine has to refuse each matrix that it would"
        " not change, and to keep an adapter that sequences use after `unload`",
        "TestAdapters": "the decode scenarios first; then the factor of a change (scale times alpha / rank), the order"
        " of its two matrices, and when the engine takes other adapters: before each batch of other sequences",
        "TestBackend": "the backend's `status`, `supports` and `load`: checks before the engine opens the file, and"
        " options that are accepted without an effect",
        "TestBadDumps": "the import of a payload: check every length against the dump before using it, and fill the"
        " sequence only after the whole dump is read",
        "TestBeam": "the fork and drop scenarios first: beams are forks of one prompt; then the rows of a batch with"
        " logits for several sequences",
        "TestChat": "the decode, truncate and cut scenarios first: a chat updates its cache with these calls only. If"
        " they hold, the chat template and the vocabulary",
        "TestChatPrograms": "the printed script: run it, and look at its last call; then the truncate, cut, fork and"
        " dump scenarios, because chats use these calls",
        "TestClose": "`close`, and objects that outlive it: contexts and models that are called later, threads of the"
        " engine, and finalizers that run at the exit of the interpreter",
        "TestCompletions": "the fork scenarios first: the prompt is decoded once and forked for each answer; then the"
        " rows of a batch of many sequences",
        "TestControlVectors": "the adapter scenarios first; then the layer of a direction (direction N is added to the"
        " output of layer N, counted from 0), the scale, and sets of low-rank changes and directions together",
        "TestConstraints": "`Vocab.token_bytes`, `encode` and `eog_ids`, which grammars use; then the rows of a batch"
        " with logits for all tokens: forced tokens are decoded in one batch",
        "TestContextDumps": "the fork and dump scenarios first; then the restore of positions that sequences share: a"
        " fork, and the tokens after it",
        "TestCut": "the rotation of keys that move (direction, frequencies, pairs side by side or half a head apart),"
        " and whether cells that a fork shares are copied before they are rotated",
        "TestDeclarations": "the declared edit level and capabilities, and whether a call beyond them raises before"
        " anything changes",
        "TestDecode": "the attention mask and positions across chunks and sequences, and the order in which rows are"
        " gathered: an error near 1 is a wrong position or a wrong neighbour, an error near the tolerance is precision",
        "TestDecodeLimits": "the count of free positions: the checks of `n_ctx` and `n_batch`, and data that a"
        " refused batch has already written",
        "TestDecodeRefusals": "the order of check, compute and exchange in `decode`: a batch with an invalid part"
        " must leave nothing behind",
        "TestDeviceSampling": "the decode scenarios first: `decode_top` differs only in its result. If they hold,"
        " ties (the lower id comes first), and buffers that are returned and then reused",
        "TestDrop": "the cells that are freed with a sequence: cells that another sequence still shares must stay",
        "TestDumpRestore": "export and import of keys and values: layout, token order, positions after edits; and the"
        " payload format's name, which must change with the layout",
        "TestDumpParts": "the dump scenarios first: the parts are the bytes of a dump. Then the source of each part:"
        " the storage of a sequence may move, but not change, while other sequences are used",
        "TestEmbeddingInput": "the decode scenarios first: a row replaces a token's row of the embedding table. Then"
        " the order of rows and tokens in a batch, and the rows that are kept to be decoded again",
        "TestEmbeddings": "the decode scenarios first: `embed` differs from `decode` in its output only. If they"
        " hold, the layer of the hidden states: after the last norm, before the output matrix",
        "TestErrors": "the checks of the call: they know the sequence, and pass it as `seq_id`. `ContextBase` does so"
        " in all its checks",
        "TestFailures": "the order of compute and exchange: lengths, tokens and cells change last, in one step; the"
        " batch is read before",
        "TestFork": "storage that two sequences share: which side copies it, and when, after either side writes; and"
        " the bound `end`",
        "TestGeneration": "the rows that `decode` returns: their order, and whether they stay valid until the next"
        " call; then the vocabulary's bytes and its EOG tokens",
        "TestAttentionBias": "the embedding scenarios first; then the bias of each key: added after the scale and the"
        " soft cap, to all queries but the key's own, moved with its row by edits, and restored with the sequence",
        "TestMropePositions": "the embedding scenarios first; then the M-RoPE position of the next token: the highest"
        " so far plus one, in time, height and width, also after an edit or a restore",
        "TestLayerStates": "the embedding scenarios first; then where the state is taken: after the layer's last sum"
        " and the direction of a control vector, as a copy, before the next layer changes it",
        "TestMtp": "the state of the token before each token in its sequence, also across batches, after an edit and"
        " in a restored sequence; then the keys of the layer, which are edited with the keys of the other layers",
        "TestHostileDumps": "every number that is read from a dump: compare it with the size of the dump before it"
        " sets the size of a buffer or a loop, or is used as an index",
        "TestHostileSessions": "`restore` of the context first: its errors for an inner dump, and the state that it"
        " leaves; all other code is above the contract",
        "TestMeaning": "the edits: deleted tokens are still attended to. If they hold on the random models, the"
        " numbers for this file's weight type",
        "TestModelBased": "the printed script: run it, and look at its last call; other failures above name the"
        " clause more precisely",
        "TestNumbers": "`precision` in the fixtures class: does the engine compute with these numbers? Then norms,"
        " biases, RoPE base and factors, tied output, and the requested KV type",
        "TestOracle": "the truncate, fork and drop scenarios first: an oracle's rollback uses these calls",
        "TestRestoreParts": "the scenarios of bad dumps first; then the order of a restore: parts are checked and"
        " kept, and the sequence is replaced after the checksum is compared",
        "TestRestoreSteps": "the scenarios of `restore_parts` first; then the storage of a restore that is not over:"
        " other sequences must not get it, and `drop` frees it",
        "TestSampling": "the rows that `decode` returns: values that are not finite, and rows that a later call"
        " overwrites; then `dump` and `restore`, which contain the sampler's state",
        "TestSession": "the truncate, cut and dump scenarios first; then `tokens` and `length`, on which a session"
        " relies",
        "TestSessionPrograms": "the printed script: run it, and look at its last call; then the truncate, cut, fork"
        " and dump scenarios, because sessions use these calls",
        "TestSessionRows": "the scenarios of embedding input, and of bidirectional blocks, first; everything else is"
        " above the contract",
        "TestSizes": "`new_context`: sizes and KV types that are rounded or replaced instead of accepted or refused",
        "TestBidirectionalBlocks": "the decode scenarios first; then the mask: each token of a block attends to the"
        " whole block and to nothing after it, and whole blocks are decoded again",
        "TestSpeculation": "the truncate scenarios first; then the rows of a batch with logits for all tokens: their"
        " order, and that each token attends only to the tokens before it",
        "TestThreads": "the lock of a context, which is acquired without waiting; and buffers that contexts of one"
        " model share",
        "TestTools": "the chat and constraint scenarios first: a call is an answer under a grammar, and its result is"
        " one more message",
        "TestTruncate": "the removed tail: is it masked, are its positions free, and do cells that a fork shares stay"
        " in place",
        "TestVocabulary": "the tokenizer: the file's pre-tokenization rule, merges, byte fallback, the leading space,"
        " and control tokens, which plain text must never become",
    }
)
"""The hints, by class name."""
