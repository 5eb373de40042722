"""Attention once more, in numpy float64, written from the paper and not from the package.

`decode_gva` follows Algorithm 1 line by line. `attend_all` covers the other attentions by building every head's
keys and values and attending token by token. Weights come in as `W[name]`, the matrix y = x @ W[name]; biases, where
there are any, as `W[name.bias]`.
"""

import numpy as np


def softmax(scores):
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def rms_norm(x, gain, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gain


def project(x, W, name):
    return x @ W[name] + W.get(f"{name}.bias", 0.0)


def rotation(position, width, theta, frequencies=None):
    """R_t with y = x @ R_t^T: pairs (i, i + width / 2) turn by position * theta^(-2 i / width), or * frequencies[i]."""
    half = width // 2
    R = np.zeros((width, width))
    for i in range(half):
        angle = position * (theta ** (-2 * i / width) if frequencies is None else frequencies[i])
        R[i, i], R[i, i + half] = np.cos(angle), -np.sin(angle)
        R[i + half, i], R[i + half, i + half] = np.sin(angle), np.cos(angle)
    return R


def decode_gva(x, W, *, H, G, d_h, d_n, d_r, theta, q_gain=None, eps=1e-6, scale=None, frequencies=None):
    """Algorithm 1 applied at each step t to x [T, hidden]; returns the outputs [T, H d_h] before projection."""
    V = [np.zeros((0, d_h)) for _ in range(G)]
    k_rope = np.zeros((0, d_r))
    outputs = []
    for t, x_t in enumerate(x):
        q_t = project(x_t, W, "q_proj").reshape(H, d_n + d_r)
        if q_gain is not None:
            q_t = rms_norm(q_t, q_gain, eps)
        v_t = project(x_t, W, "v_proj").reshape(G, d_h)
        for g in range(G):
            V[g] = np.vstack([V[g], v_t[g]])
        R_t = rotation(t, d_r, theta, frequencies)
        k_rope = np.vstack([k_rope, project(x_t, W, "k_rope_proj") @ R_t.T])
        heads = []
        for h in range(H):
            g = h // (H // G)
            q_nope, q_rope = q_t[h, :d_n], q_t[h, d_n:] @ R_t.T
            M_h = W["key_map"][:, h * d_n : (h + 1) * d_n]
            q_absorbed = q_nope @ M_h.T
            s = q_absorbed @ V[g].T + q_rope @ k_rope.T
            heads.append(softmax(s * (scale or 1 / np.sqrt(d_n + d_r))) @ V[g])
        outputs.append(np.concatenate(heads))
    return np.array(outputs)


def attend_all(x, W, *, kind, H, G, d_h, d_n, d_r, theta, q_gain=None, eps=1e-6, scale=None, frequencies=None):
    """Outputs [T, H d_h] of attention `kind`, from every head's explicit keys [T, H, d_qk] and values [T, H, d_h]."""
    T, R = len(x), H // G
    q = project(x, W, "q_proj").reshape(T, H, -1)
    if q_gain is not None:
        q = rms_norm(q, q_gain, eps)
    if kind == "mla":
        c = project(x, W, "latent_proj")
        if "latent_norm" in W:
            c = rms_norm(c, W["latent_norm"], eps)
        k = (c @ W["k_up_proj"]).reshape(T, H, d_n)
        v = (c @ W["v_up_proj"]).reshape(T, H, d_h)
    else:
        groups = project(x, W, "v_proj").reshape(T, G, d_h)
        v = np.stack([groups[:, h // R] for h in range(H)], 1)
        if kind == "gqa":
            own = project(x, W, "k_proj").reshape(T, G, d_h)
            k = np.stack([own[:, h // R] for h in range(H)], 1)
        elif kind == "gva_untied":
            own = project(x, W, "k_proj").reshape(T, G, d_n)
            k = np.stack([own[:, h // R] for h in range(H)], 1)
        elif kind == "gva_look_back":
            before = np.concatenate([np.zeros_like(v[:1]), v[:-1]])
            both = np.concatenate([v, before], -1)
            maps = np.concatenate([W["key_map"], W["back_map"]])
            k = np.stack([both[:, h] @ maps[:, h * d_n : (h + 1) * d_n] for h in range(H)], 1)
        elif kind == "gva":
            k = np.stack([v[:, h] @ W["key_map"][:, h * d_n : (h + 1) * d_n] for h in range(H)], 1)
        else:  # shared_kv, gta: the key is the value, or its first half
            k = v[..., :d_n]
    if d_r:
        shared = project(x, W, "k_rope_proj")
        k = np.concatenate([k, np.repeat(shared[:, None], H, 1)], -1)
    width = d_r or d_h
    turned_q, turned_k = q.copy(), k.copy()
    for t in range(T):
        R_t = rotation(t, width, theta, frequencies)
        turned_q[t, :, -width:] = q[t, :, -width:] @ R_t.T
        turned_k[t, :, -width:] = k[t, :, -width:] @ R_t.T
    out = np.zeros((T, H, d_h))
    for t in range(T):
        for h in range(H):
            s = turned_k[: t + 1, h] @ turned_q[t, h] * (scale or 1 / np.sqrt(q.shape[-1]))
            out[t, h] = softmax(s) @ v[: t + 1, h]
    return out.reshape(T, -1)
