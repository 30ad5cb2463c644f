#include "tests/reference_layers.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>

namespace slm {

namespace {

struct Heads { std::size_t n, n_kv; };

Wide limited(Wide x, float limit) {
    for (double& value : x)
        if (limit != 0) value = std::clamp(value, -double(limit), double(limit));
    return x;
}

// Rotates the first n_rotated values of heads x [n_all][n][row].
Wide rotated_by(const Model& model, Wide x, std::size_t n, bool interleaved) {
    const std::size_t row = x.size() / n_all / n, half = model.n_rotated / 2;
    for (std::size_t at = 0; at < x.size(); at += row)
        for (std::size_t i = 0; i < half; ++i) {
            const std::size_t angle = at / (n * row) * half + i;
            double &a = x[at + (interleaved ? 2 * i : i)], &b = x[at + (interleaved ? 2 * i + 1 : half + i)];
            const double c = double(model.cos[angle]), s = double(model.sin[angle]), first = a * c - b * s;
            b = b * c + a * s, a = first;
        }
    return x;
}

// Keys are as wide as queries; values may have another width.
Wide attended(const Scoring& scoring, Heads heads, const Wide& q, const Wide& k, const Wide& v) {
    const std::size_t n_k = q.size() / n_all / heads.n, n_v = v.size() / n_all / heads.n_kv;
    Wide mixed(n_all * heads.n * n_v);
    for (std::size_t t = 0; t < n_all; ++t)
        for (std::size_t head = 0; head < heads.n; ++head) {
            const std::size_t kv = head / (heads.n / heads.n_kv),
                              first = t + 1 < scoring.window ? 0 : t + 1 - scoring.window;
            double total = scoring.sinks ? std::exp(double(scoring.sinks[head])) : 0;
            double* out = &mixed[(t * heads.n + head) * n_v];
            for (std::size_t s = first; s <= t; ++s) {
                const double *query = &q[(t * heads.n + head) * n_k], *key = &k[(s * heads.n_kv + kv) * n_k];
                double score = std::inner_product(query, query + n_k, key, 0.0) * double(scoring.scale);
                if (scoring.softcap != 0) score = double(scoring.softcap) * std::tanh(score / double(scoring.softcap));
                total += std::exp(score);
                for (std::size_t i = 0; i < n_v; ++i) out[i] += std::exp(score) * v[(s * heads.n_kv + kv) * n_v + i];
            }
            for (std::size_t i = 0; i < n_v; ++i) out[i] /= total;
        }
    return mixed;
}

// Rotated keys, and values, of each layer; later layers may read them.
using KeysAndValues = std::vector<std::pair<Wide, Wide>>;

Wide attended_by_heads(const Model& model, std::size_t i, const Wide& in, KeysAndValues& stored) {
    const Layer& layer = model.layers[i];
    if (layer.k.matrix) {
        const Wide keys = limited(times(in, layer.k), layer.limit);
        const Wide values = layer.v.matrix ? limited(times(in, layer.v), layer.limit) : keys;
        stored[i] = {rotated_by(model, normed(keys, layer.k_norm), model.n_kv_heads, model.interleaved(i)),
                     normed(values, layer.v_norm)};
    }
    const Wide queries = normed(limited(times(in, layer.q), layer.limit), layer.q_norm);
    const auto& [k, v] = stored[model.caches[i]];
    return attended(layer.scoring, {model.n_heads, model.n_kv_heads},
                    rotated_by(model, queries, model.n_heads, model.interleaved(i)), k, v);
}

// Latents [n_all][C] times a matrix for each head, (C, N) transposed, or (U, C): [n_all][H][N] or [n_all][H][U].
Wide per_head(const Wide& latents, std::span<const Matrix* const> matrices, bool transposed) {
    const std::size_t n_in = latents.size() / n_all, n_out = transposed ? matrices[0]->n_in : matrices[0]->n_out;
    Wide y(n_all * matrices.size() * n_out);
    for (std::size_t at = 0; at < y.size(); ++at) {
        const std::size_t t = at / n_out / matrices.size(), r = at % n_out;
        const auto* w = reinterpret_cast<const float*>(matrices[at / n_out % matrices.size()]->data);
        for (std::size_t c = 0; c < n_in; ++c)
            y[at] += latents[t * n_in + c] * double(w[transposed ? c * n_out + r : r * n_in + c]);
    }
    return y;
}

// MLA without matrix absorption: expands keys and values of each head from the latent. The rotated part comes first in
// queries and keys.
Wide attended_by_latents(const Model& model, std::size_t i, const Wide& in) {
    const Layer& layer = model.layers[i];
    const Latent& latent = layer.latent;
    const std::size_t n = model.n_heads, n_rotated = model.n_rotated, rank = model.head_dim - n_rotated;
    const std::size_t nope = latent.k_up[0]->n_in, row = nope + n_rotated;
    const Wide q = times(latent.q_down.matrix ? normed(times(in, latent.q_down), latent.q_norm) : in, latent.q);
    const Wide kv = times(in, latent.kv_down);
    Wide latents(n_all * rank), rotated(n_all * n_rotated), queries(q.size()), keys(q.size());
    for (std::size_t t = 0; t < n_all; ++t) {
        std::copy_n(&kv[t * model.head_dim], rank, &latents[t * rank]);
        std::copy_n(&kv[t * model.head_dim + rank], n_rotated, &rotated[t * n_rotated]);
    }
    latents = normed(latents, latent.kv_norm), rotated = rotated_by(model, rotated, 1, model.interleaved(i));
    const Wide expanded = per_head(latents, latent.k_up, true);
    for (std::size_t at = 0; at < n_all * n; ++at) {
        double *query = &queries[at * row], *key = &keys[at * row];
        std::copy_n(&q[at * row + nope], n_rotated, query), std::copy_n(&q[at * row], nope, query + n_rotated);
        std::copy_n(&rotated[at / n * n_rotated], n_rotated, key),
            std::copy_n(&expanded[at * nope], nope, key + n_rotated);
    }
    return attended(layer.scoring, {n, n}, rotated_by(model, queries, n, model.interleaved(i)), keys,
                    per_head(latents, latent.v_up, false));
}

// The output of the feed-forward layer.
Wide fed_forward(const Layer& layer, const Wide& x) {
    const Wide in = normed(x, layer.ffn_norm);
    const FeedForward dense{layer.gating.gate, layer.gating.up, layer.down};
    if (!layer.moe && !dense.up.matrix) return Wide(x.size());
    const Wide output = layer.moe ? reference_moe(*layer.moe, in)
                                  : feed_forward(dense, layer.gating.activation, layer.gating.threshold, in);
    return normed(output, layer.ffn_post_norm);
}

// x + share * branch.
Wide sum_of(const Wide& x, const Wide& branch, double share = 1) {
    Wide y(x);
    for (std::size_t i = 0; i < x.size(); ++i) y[i] += share * branch[i];
    return y;
}

Wide scaled(Wide x, double factor) {
    for (double& value : x) value *= factor;
    return x;
}

Wide through_layer(const Model& model, std::size_t i, const Wide& x, KeysAndValues& stored) {
    const Layer& layer = model.layers[i];
    const double share = double(layer.residual_scale);
    const Wide in = normed(x, layer.attn_norm);
    const Wide mixed = model.is_latent ? attended_by_latents(model, i, in) : attended_by_heads(model, i, in, stored);
    Wide after = sum_of(x, normed(times(mixed, layer.output), layer.attn_post_norm), share);
    if (layer.left.matrix)
        after = scaled(sum_of(after, sum_of(in, normed(times(times(in, layer.left), layer.right), layer.right_norm))),
                       std::sqrt(0.5));
    return sum_of(after, fed_forward(layer, layer.parallel ? x : after), share);
}

// The contribution of the per-layer embedding.
Wide add_layer_embedding(const Model& model, std::size_t i, const Wide& x) {
    const LayerEmbedding& embedding = model.layers[i].embedding;
    Wide low = activated(embedding.activation, times(x, embedding.gate));
    for (std::size_t k = 0; k < low.size(); ++k) low[k] *= double(model.layer_embeddings[i][k]);
    return normed(times(low, embedding.project), embedding.norm);
}

// linear(tanh(router(x))) of each token.
Wide shares_of(const AltUp& altup, const Linear& linear, const Wide& x) {
    Wide modalities = times(normed(x, altup.router_norm), altup.router);
    for (double& value : modalities) value = std::tanh(value);
    return times(modalities, linear);
}

// x += (share + more) * y, with one share per token, `stride` numbers apart.
void add_share(Wide& x, const Wide& y, const double* share, std::size_t stride, double more = 0) {
    const std::size_t width = x.size() / n_all;
    for (std::size_t i = 0; i < x.size(); ++i) x[i] += y[i] * (share[i / width * stride] + more);
}

void through_streams(const Model& model, std::size_t i, std::vector<Wide>& streams, KeysAndValues& stored) {
    const AltUp& altup = model.layers[i].altup;
    const std::size_t n = streams.size();
    const Wide mixing = shares_of(altup, altup.predict, streams[altup.active]);
    std::vector<Wide> predicted(streams);
    for (std::size_t k = 0; k < n * n; ++k) add_share(predicted[k / n], streams[k % n], &mixing[k], n * n);
    const Wide output = through_layer(model, i, predicted[altup.active], stored),
               innovation = sum_of(output, predicted[altup.active], -1);
    const Wide correction = shares_of(altup, altup.correct, output);
    for (std::size_t k = 0; k < n; ++k) add_share(predicted[k], innovation, &correction[k], n, 1);
    Wide read(predicted[altup.active]);
    for (std::size_t k = 0; k < read.size(); ++k) read[k] *= double(altup.scale[k % model.width]);
    const Wide added = add_layer_embedding(model, i, read);
    for (std::size_t k = 0; k < n; ++k) streams[k] = k ? sum_of(predicted[k], added) : predicted[k];
}

}  // namespace

Wide plain_layers(const Model& model, const std::vector<float>& x) {
    const std::size_t n = n_all * model.width;
    std::vector<Wide> streams;
    streams.reserve(model.n_streams);
    for (std::size_t k = 0; k < model.n_streams; ++k) streams.emplace_back(&x[k * n], &x[k * n] + n);
    KeysAndValues stored(model.layers.size());
    for (std::size_t i = 0; i < model.layers.size(); ++i) {
        const Layer& layer = model.layers[i];
        const bool has_streams = layer.altup.router.matrix;
        if (has_streams) through_streams(model, i, streams, stored);
        else streams[0] = through_layer(model, i, streams[0], stored);
        if (!has_streams && layer.embedding.gate.matrix)
            streams[0] = sum_of(streams[0], add_layer_embedding(model, i, streams[0]));
        streams[0] = scaled(streams[0], double(layer.output_scale));
    }
    Wide y;
    for (const Wide& stream : streams) y.insert(y.end(), stream.begin(), stream.end());
    return y;
}

}  // namespace slm
