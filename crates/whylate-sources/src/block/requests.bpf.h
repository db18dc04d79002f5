/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Requests in progress, found by their addresses: a set of eight in one cache line tells which slot has one. A request
 * has one owner at a time, from the thread that makes it to whoever ends it, so only taking a slot is a race.
 */
#pragma once

#include "disks.bpf.h"
#include "settings.bpf.h"

enum request_limits {
	SET_BITS = 12,
	SETS = 1 << SET_BITS,
	SET_WAYS = 8,
	/* 32,768 requests; at a quarter of that, one in a million finds its set full. */
	SLOTS = SETS * SET_WAYS,
	NO_SLOT = SLOTS,
	BIO_BITS = 12,
	BIOS = 1 << BIO_BITS,

};

struct request_set {
	u64 requests[SET_WAYS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SETS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct request_set);
} set_by_hash SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct block_request);
} request_by_slot SEC(".maps");

/*
 * When bios came, which are not in a request yet. A newer one takes the place of an older one, that has been merged into
 * a request or never gets one (bio-based devices).
 */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, BIOS);
	__type(key, u32);
	__type(value, u64);
} moment_by_bio SEC(".maps");

/* Those that are done, for each CPU its own; user space makes it as long as all of them take. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct done_request);
} done_by_position SEC(".maps");

static __always_inline u64 spread(u64 address)
{
	return (address >> 4) * 0x9E3779B97F4A7C15ull;
}

enum {
	/* Of a word: whose it is. The rest are nanoseconds, which come round after 18 minutes. */
	TAG_BITS = 24,
	MOMENT_BITS = 64 - TAG_BITS,
};

static __always_inline void bio_comes(u64 bio, u64 now_ns)
{
	u64 hash = spread(bio);
	u32 index = hash >> (64 - BIO_BITS);
	u64 *moment = bpf_map_lookup_elem(&moment_by_bio, &index);

	if (moment)
		*moment = (hash >> (64 - BIO_BITS - TAG_BITS)) << MOMENT_BITS | (now_ns & ((1ull << MOMENT_BITS) - 1));
}

/* When it came; now where that was not seen. */
static __always_inline u64 bio_came_ns(u64 bio, u64 now_ns)
{
	u64 mask = (1ull << MOMENT_BITS) - 1;
	u64 hash = spread(bio);
	u32 index = hash >> (64 - BIO_BITS);
	u64 *moment = bpf_map_lookup_elem(&moment_by_bio, &index);
	u64 seen = moment ? *moment : 0;

	if (!bio || !seen || seen >> MOMENT_BITS != ((hash >> (64 - BIO_BITS - TAG_BITS)) & ((1u << TAG_BITS) - 1)))
		return now_ns;
	return now_ns - ((now_ns - seen) & mask);
}

/* The slot that has the request, else NO_SLOT. */
static __always_inline u32 slot_of(u64 request, struct request_set **set)
{
	u32 index = spread(request) >> (64 - SET_BITS);

	*set = bpf_map_lookup_elem(&set_by_hash, &index);
	if (!*set)
		return NO_SLOT;
#pragma unroll
	for (u32 way = 0; way < SET_WAYS; way++) {
		if ((*set)->requests[way] == request)
			return index * SET_WAYS + way;
	}
	return NO_SLOT;
}

static __always_inline u32 take_slot(u64 request, struct request_set *set)
{
	u32 index = spread(request) >> (64 - SET_BITS);

	for (u32 way = 0; way < SET_WAYS; way++) {
		if (!set->requests[way] && !__sync_val_compare_and_swap(&set->requests[way], 0, request))
			return index * SET_WAYS + way;
	}
	return NO_SLOT;
}

static __always_inline struct block_request *request_in(u32 slot)
{
	return bpf_map_lookup_elem(&request_by_slot, &slot);
}

static __always_inline void forget(struct request_set *set, u32 slot)
{
	struct block_request *begun = request_in(slot);

	if (begun)
		begun->request = 0;
	barrier();
	set->requests[slot & (SET_WAYS - 1)] = 0;
}

static __always_inline enum operation operation_of(u32 flags, u32 bytes)
{
	switch (flags & REQ_OP_MASK) {
	case REQ_OP_READ:
		return READS;
	case REQ_OP_WRITE:
		/* Empty, for the flush before it. */
		return bytes ? WRITES : FLUSHES;
	case REQ_OP_FLUSH:
		return FLUSHES;
	case REQ_OP_DISCARD:
	case REQ_OP_SECURE_ERASE:
		return DISCARDS;
	default:
		return DOES_OTHER;
	}
}

static __always_inline u64 cgroup_of_bio(const struct bio *bio)
{
	/* CONFIG_BLK_CGROUP */
	if (!bpf_core_field_exists(bio->bi_blkg) || !bio || !bio->bi_blkg)
		return 0;
	return bio->bi_blkg->blkcg->css.cgroup->kn->id;
}

static __always_inline void describe(struct request_facts *facts, const struct request *request)
{
	struct task_struct *task = bpf_get_current_task_btf();

	facts->sector = request->__sector;
	facts->bytes = request->__data_len;
	facts->flags = request->cmd_flags;
	facts->operation = operation_of(request->cmd_flags, request->__data_len);
	facts->device = device_of(request);
	facts->cgroup = cgroup_of_bio(request->bio);
	facts->tid = shown_number(task);
	facts->pid = shown_process(task);
	bpf_get_current_comm(facts->comm, sizeof(facts->comm));
}

/* A request begins. What began before in the same memory and was not seen ending is lost. */
static __always_inline void request_begins(const struct request *request, bool is_issued)
{
	u64 now_ns = bpf_ktime_get_ns();
	struct request_set *set;
	u32 slot = slot_of((u64)request, &set);
	struct block_request *begun;

	if (!set)
		return;
	if (slot != NO_SLOT) {
		lose(LOST_REUSED);
	} else {
		slot = take_slot((u64)request, set);
		if (slot == NO_SLOT) {
			lose(LOST_REQUESTS_FULL);
			return;
		}
	}
	begun = request_in(slot);
	if (!begun)
		return;
	/* User space may be reading. */
	begun->request = 1;
	barrier();
	describe(&begun->facts, request);
	begun->made_ns = now_ns;
	begun->submitted_ns = bio_came_ns((u64)request->bio, now_ns);
	begun->issued_ns = is_issued ? now_ns : 0;
	barrier();
	begun->request = (u64)request;
}
