/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Distributions per device and operation, and per process, thread or cgroup if selected. */
#pragma once

#include "requests.bpf.h"

enum distribution_kind {
	LATENCY,
	THROTTLED,
	QUEUED,
	DEVICE,
	COMPLETION,
	DISTRIBUTION_KINDS,
};

struct block_key {
	u32 device;
	u32 operation;
	/* A cgroup; or a PID or TID, with its identity in the upper half. */
	u64 owner;
};

struct series {
	/* ELEMENT_COUNTS, or as in elements.bpf.h. */
	u64 state;
	struct block_key key;
	char comm[COMM_LENGTH];
	u64 bytes;
	u64 errors;
	struct distribution distributions[DISTRIBUTION_KINDS];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	/* User space reduces the size of both if there are few series. */
	__uint(max_entries, MAX_SERIES);
	__type(key, struct block_key);
	__type(value, u32);
} series_by_key SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SERIES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct series);
} series_by_id SEC(".maps");

enum {
	HINTS = 64,
};

/* The last series counted for a device and operation. */
u32 hinted_series[HINTS] = {};

static __always_inline bool has_key(const struct series *series, const struct block_key *key)
{
	return series->key.device == key->device && series->key.operation == key->operation && series->key.owner == key->owner;
}

/* The order of the steps is that of elements.bpf.h. */
static __noinline struct series *new_series(const struct block_key *key, const struct request_facts *facts)
{
	u32 id = take_element(&series_by_id, series_limit), *known;
	struct series *series = bpf_map_lookup_elem(&series_by_id, &id);

	if (!id || !series)
		return NULL;
	series->key = *key;
	__builtin_memcpy(series->comm, series_key == BY_PROCESS ? facts->process : facts->comm, sizeof(series->comm));
	if (!bpf_map_update_elem(&series_by_key, key, &id, BPF_NOEXIST)) {
		store_in_order(&series->state, ELEMENT_COUNTS);
		return series;
	}
	/* Another CPU was faster. */
	__builtin_memset(&series->key, 0, sizeof(series->key));
	return_element(&series_by_id, id);
	known = bpf_map_lookup_elem(&series_by_key, key);
	series = known ? bpf_map_lookup_elem(&series_by_id, known) : NULL;
	return series && has_key(series, key) ? series : NULL;
}

static __always_inline struct series *series_of(const struct request_facts *facts)
{
	struct block_key key = { .device = facts->device, .operation = facts->operation };
	u32 hint = (key.device * OPERATIONS + key.operation) & (HINTS - 1);
	struct series *series;
	u32 *id, hinted;

	if (series_key == BY_PROCESS)
		key.owner = (u64)facts->identity << 32 | facts->pid;
	else if (series_key == BY_THREAD)
		key.owner = (u64)facts->identity << 32 | facts->tid;
	else if (series_key == BY_CGROUP)
		key.owner = facts->cgroup;
	hinted = hinted_series[hint];
	series = bpf_map_lookup_elem(&series_by_id, &hinted);
	if (series && series->state == ELEMENT_COUNTS && has_key(series, &key))
		return series;
	id = bpf_map_lookup_elem(&series_by_key, &key);
	series = id ? bpf_map_lookup_elem(&series_by_id, id) : NULL;
	if (!id || !series || !has_key(series, &key))
		return new_series(&key, facts);
	hinted_series[hint] = *id;
	return series;
}

static __always_inline void count(struct series *series, enum distribution_kind kind, u64 ns)
{
	if (!distribution_add(&series->distributions[kind], ns, true))
		lose(LOST_BUCKETS_FULL);
}

static __always_inline void count_done(const struct block_request *request, u64 signaled_ns, u64 now_ns, s32 error)
{
	struct series *series = series_of(&request->facts);

	if (!series) {
		lose(LOST_SERIES_FULL);
		return;
	}
	count(series, LATENCY, since(now_ns, request->submitted_ns));
	if (wants_phases) {
		count(series, THROTTLED, since(request->allocated_ns, request->submitted_ns));
		count(series, QUEUED, since(request->issued_ns, request->allocated_ns));
		count(series, DEVICE, since(signaled_ns, request->issued_ns));
		count(series, COMPLETION, since(now_ns, signaled_ns));
	}
	__sync_fetch_and_add(&series->bytes, request->facts.bytes);
	if (error)
		__sync_fetch_and_add(&series->errors, 1);
}
