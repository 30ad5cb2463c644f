#include "attention/attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "matmul/products.h"

namespace slm {

namespace {

// Pages per task of few queries. The number does not depend on the number of threads, so neither do results.
constexpr std::size_t pages_at_a_time = 16;
constexpr std::size_t tokens_at_a_time = 16;

thread_local Scratch work_scratch, partial_scratch;

std::size_t div_up(std::size_t a, std::size_t b) { return (a + b - 1) / b; }

// Some queries of a run with one KV head.
struct Task {
    Queries queries;
    bool is_few;
    std::size_t n_parts;  // number of tasks that split the positions; this is one of them
    std::size_t partial;  // index of its first partial softmax
    std::size_t cost() const { return queries.n_tokens * (queries.end - queries.begin); }
};

std::size_t pages_of(const Queries& queries) { return div_up(queries.end, page_tokens) - queries.begin / page_tokens; }

Queries queries_of(const KvLayer& layer, const Run& run, const Scoring& scoring, std::size_t n_heads, const float* q,
                   float* out) {
    Queries all{};
    all.layer = &layer, all.scoring = &scoring, all.pages = run.pages;
    all.q = q, all.out = out, all.tokens = run.tokens;
    all.n_tokens = run.n_tokens, all.position = run.n_held - run.n_tokens;
    all.n_heads = n_heads, all.group = n_heads / layer.n_kv_heads;
    all.key_dim = all.value_dim = layer.head_dim;
    all.block_begin = run.bidirectional ? all.position : no_block;
    all.end = run.n_held;
    return all;
}

// Skips pages before the window of the first query, but no page of its bidirectional block.
Queries some_of(const Queries& all, std::size_t first, std::size_t n_tokens) {
    Queries some = all;
    some.tokens += first, some.position += first, some.n_tokens = n_tokens;
    const std::size_t window = all.scoring->window;
    some.begin =
        std::min(all.block_begin, some.position < window ? 0 : some.position - window + 1) / page_tokens * page_tokens;
    some.end = all.block_begin == no_block ? some.position + n_tokens : all.end;
    return some;
}

// One task for each KV head and each block of queries.
std::vector<Task> tasks_of(const AttentionKernels& kernels, const KvLayer& layer, const std::vector<Run>& runs,
                           const Scoring& scoring, std::size_t n_heads, const float* q, float* out) {
    std::vector<Task> tasks;
    for (const Run& run : runs) {
        Queries all = queries_of(layer, run, scoring, n_heads, q, out);
        const bool is_few = all.n_tokens == 1 || all.n_tokens * all.group <= kernels.most_rows_few;
        const std::size_t step = is_few ? all.n_tokens : std::max<std::size_t>(1, kernels.most_rows_many / all.group);
        for (std::size_t first = 0; first < all.n_tokens; first += step)
            for (all.kv_head = 0; all.kv_head < layer.n_kv_heads; ++all.kv_head) {
                all.first_head = all.kv_head * all.group;
                tasks.push_back({some_of(all, first, std::min(step, all.n_tokens - first)), is_few, 1, 0});
            }
    }
    return tasks;
}

// One task for each head with expanded keys or values and each block of queries.
std::vector<Task> tasks_expanded(const AttentionKernels& kernels, const KvLayer& layer, const Run& run,
                                 const Scoring& scoring, std::size_t n_heads, const float* q,
                                 const ExpandedHeads& expanded, float* out) {
    std::vector<Task> tasks;
    Queries all = queries_of(layer, run, scoring, n_heads, q, out);
    all.group = 1, all.value_dim = expanded.value_width;
    if (expanded.keys) all.key_dim = expanded.key_width;
    for (std::size_t i = 0; i < expanded.n_heads; ++i) {
        all.first_head = expanded.first_head + i, all.values = expanded.values + i * run.n_held * expanded.value_width;
        all.keys = expanded.keys ? expanded.keys + i * run.n_held * expanded.key_width : nullptr;
        for (std::size_t first = 0; first < all.n_tokens; first += kernels.most_rows_many)
            tasks.push_back({some_of(all, first, std::min(kernels.most_rows_many, all.n_tokens - first)), false, 1, 0});
    }
    return tasks;
}

// Splits tasks of few queries by positions. Tasks of one head stay adjacent.
std::vector<Task> split_by_position(const std::vector<Task>& tasks) {
    std::vector<Task> parts;
    for (const Task& task : tasks) {
        const std::size_t n_pages = pages_of(task.queries), step = task.is_few ? pages_at_a_time : n_pages;
        for (std::size_t page = 0; page < n_pages; page += step) {
            Task part = task;
            part.queries.begin += page * page_tokens;
            part.queries.end = std::min(task.queries.end, part.queries.begin + step * page_tokens);
            part.n_parts = div_up(n_pages, step);
            parts.push_back(part);
        }
    }
    return parts;
}

std::size_t widest(const Queries& queries) {
    return std::max({queries.layer->head_dim, queries.key_dim, queries.value_dim});
}
std::size_t n_rows(const Queries& queries) { return queries.n_tokens * queries.group; }

// Merges the partial softmaxes of a row, `stride` apart, into `out`.
void merge_row(const float* partial, std::size_t n, std::size_t stride, std::size_t head_dim, const float* sink,
               float* out) {
    float top = sink ? *sink : partial[0];
    for (std::size_t i = 0; i < n; ++i) top = std::max(top, partial[i * stride]);
    float total = sink ? std::exp(*sink - top) : 0.0f;
    for (std::size_t i = 0; i < n; ++i) total += partial[i * stride + 1] * std::exp(partial[i * stride] - top);
    std::fill_n(out, head_dim, 0.0f);
    for (std::size_t i = 0; i < n; ++i) {
        const float share = std::exp(partial[i * stride] - top) / total;
        const float* sums = partial + i * stride + partial_extra;
        for (std::size_t k = 0; k < head_dim; ++k) out[k] += sums[k] * share;
    }
}

void merge(const Queries& queries, std::size_t n_parts, const float* partial) {
    const std::size_t head_dim = queries.layer->head_dim, row_floats = head_dim + partial_extra;
    for (std::size_t r = 0; r < n_rows(queries); ++r) {
        const std::size_t head = queries.first_head + r % queries.group;
        const std::size_t token = std::size_t(queries.tokens[r / queries.group]);
        const float* sink = queries.scoring->sinks ? queries.scoring->sinks + head : nullptr;
        merge_row(partial + r * row_floats, n_parts, n_rows(queries) * row_floats, head_dim, sink,
                  queries.out + (token * queries.n_heads + head) * head_dim);
    }
}

void run_tasks(const AttentionKernels& attention, Pool& pool, const KvLayer& layer, std::vector<Task> tasks) {
    std::size_t n_partial = 0;
    for (Task& task : tasks)
        if (task.is_few) task.partial = n_partial, n_partial += n_rows(task.queries) * (layer.head_dim + partial_extra);
    float* partial = partial_scratch.buffer<float>(n_partial);
    std::vector<const Task*> order;
    order.reserve(tasks.size());
    for (const Task& task : tasks) order.push_back(&task);
    std::stable_sort(order.begin(), order.end(), [](const Task* a, const Task* b) { return a->cost() > b->cost(); });
    pool.run(order.size(), [&](std::size_t i) {
        const Task& task = *order[i];
        const std::size_t rows = n_rows(task.queries);
        if (!task.is_few)
            return attention.many(task.queries,
                                  work_scratch.buffer<float>(attention.many_work(rows, widest(task.queries))));
        float* work = work_scratch.buffer<float>(attention.few_work(rows, layer.head_dim));
        attention.few(task.queries, work, partial + task.partial);
        if (task.n_parts == 1) merge(task.queries, 1, partial + task.partial);
    });
    for (std::size_t i = 0; i < tasks.size(); i += tasks[i].n_parts)
        if (tasks[i].n_parts > 1) merge(tasks[i].queries, tasks[i].n_parts, partial + tasks[i].partial);
}

}  // namespace

void token_bytes(KvType type, std::size_t head_dim, std::size_t (&bytes)[most_planes]) {
    const bool in_blocks = type >= KvType::q8_0, has_nibbles = type > KvType::q8_0;
    bytes[0] = type == KvType::f32 ? 4 * head_dim : has_nibbles ? head_dim / 2 : in_blocks ? head_dim : 2 * head_dim;
    bytes[1] = in_blocks ? head_dim / 32 * 2 : 0;
    bytes[2] = type == KvType::q6_0 ? head_dim / 32 * 8 : type == KvType::q5_0 ? head_dim / 32 * 4 : 0;
}

KvLayer layer_of(std::uint8_t* pages, std::size_t n_pages, std::size_t page_bytes, KvType keys, KvType values,
                 bool in_keys, const KvLayout& layout) {
    const auto [n_layers, layer, n_kv_heads, head_dim] = layout;
    if (layer >= n_layers || n_kv_heads < 1 || head_dim < 1) throw std::invalid_argument("no such layer, or no heads");
    KvLayer result{{keys, {}, {}}, {values, {}, {}}, n_pages, page_bytes, n_kv_heads, head_dim};
    std::size_t offset = 0;
    for (KvPlanes* planes : {&result.keys, &result.values}) {
        if (in_keys && planes == &result.values) {
            result.values = result.keys;
            break;
        }
        std::size_t bytes[most_planes];
        token_bytes(planes->type, head_dim, bytes);
        if (planes->type >= KvType::q8_0 && head_dim % 32)
            throw std::invalid_argument("heads of this width are no whole number of blocks of 32");
        for (std::size_t i = 0; i < most_planes; ++i) {
            if (!bytes[i]) continue;
            planes->head_bytes[i] = page_tokens * bytes[i];
            planes->at[i] = pages + offset + layer * n_kv_heads * planes->head_bytes[i];
            offset += n_layers * n_kv_heads * planes->head_bytes[i];
        }
    }
    if (offset != page_bytes)
        throw std::invalid_argument("a page of these types and sizes has " + std::to_string(offset) + " bytes, not " +
                                    std::to_string(page_bytes));
    return result;
}

void attend(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, const std::vector<Run>& runs,
            const Scoring& scoring, std::size_t n_heads, const float* q, float* out) {
    run_tasks(*kernels.attention, pool, layer,
              split_by_position(tasks_of(*kernels.attention, layer, runs, scoring, n_heads, q, out)));
}

void attend_expanded(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, const Run& run,
                     const Scoring& scoring, std::size_t n_heads, const float* q, const ExpandedHeads& expanded,
                     float* out) {
    run_tasks(*kernels.attention, pool, layer,
              tasks_expanded(*kernels.attention, layer, run, scoring, n_heads, q, expanded, out));
}

void read(const IsaKernels& kernels, const KvLayer& layer, const std::int32_t* pages, std::size_t position,
          std::size_t head, float* to) {
    Slice at{};
    const std::size_t page = std::size_t(pages[position / page_tokens]) * layer.page_bytes,
                      slot = position % page_tokens;
    for (std::size_t i = 0; i < most_planes; ++i)
        if (layer.keys.at[i])
            at.at[i] = layer.keys.at[i] + page + head * layer.keys.head_bytes[i] +
                       slot * (layer.keys.head_bytes[i] / page_tokens);
    kernels.attention->decode(layer.keys.type, at, layer.head_dim, to);
}

void write(const IsaKernels& kernels, Pool& pool, const KvLayer& layer, std::size_t n_tokens, const std::int64_t* pages,
           const std::int64_t* slots, const float* k, const float* v) {
    const auto put = [&](const KvPlanes& planes, std::size_t token, std::size_t head, const float* x) {
        std::uint8_t* to[most_planes] = {};
        for (std::size_t i = 0; i < most_planes; ++i)
            if (planes.at[i])
                to[i] = planes.at[i] + std::size_t(pages[token]) * layer.page_bytes + head * planes.head_bytes[i] +
                        std::size_t(slots[token]) * (planes.head_bytes[i] / page_tokens);
        kernels.attention->encode(planes.type, x + (token * layer.n_kv_heads + head) * layer.head_dim, layer.head_dim,
                                  to);
    };
    pool.run(div_up(n_tokens, tokens_at_a_time), [&](std::size_t i) {
        const std::size_t end = std::min(n_tokens, (i + 1) * tokens_at_a_time);
        for (std::size_t token = i * tokens_at_a_time; token < end; ++token)
            for (std::size_t head = 0; head < layer.n_kv_heads; ++head)
                put(layer.keys, token, head, k), put(layer.values, token, head, v);
    });
}

}  // namespace slm
