/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Requests in progress, found by their addresses: a set of seven in one cache line tells which slot has one. A request
 * has one owner at a time, from the thread that makes it to whoever ends it, so only taking a slot is a race.
 */
#pragma once

#include "disks.bpf.h"
#include "settings.bpf.h"

enum request_limits {
	SET_BITS = 12,
	SETS = 1 << SET_BITS,
	/* Of a set; one more than ways are there. */
	SLOTS_A_SET = 8,
	/* 28,672 requests; at a quarter of that, one in a hundred thousand finds its set full. */
	SLOTS = SETS * SLOTS_A_SET,
	NO_SLOT = SLOTS,
	BIO_BITS = 12,
	BIOS = 1 << BIO_BITS,
};

struct request_set {
	u64 requests[WAYS];
} __attribute__((aligned(64)));

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

enum {
	/* Of a word: whose it is. The rest are nanoseconds, which come round after 18 minutes. */
	TAG_BITS = 24,
	MOMENT_BITS = 64 - TAG_BITS,
};

/* What tells bios apart that share a word: objects of the kernel are aligned to 64 bytes and more. */
static __always_inline u64 tag_of(u32 low)
{
	return (u64)(low >> 6) << MOMENT_BITS;
}

static __always_inline u64 *moment_of(u32 low)
{
	u32 index = hash_of(low, BIO_BITS);

	return bpf_map_lookup_elem(&moment_by_bio, &index);
}

static __always_inline void bio_comes(u64 bio, u64 now_ns)
{
	u32 low = low_half(bio);
	u64 *moment = moment_of(low);

	if (moment)
		*moment = tag_of(low) | (now_ns & ((1ull << MOMENT_BITS) - 1));
}

/* When it came; now where that was not seen. */
static __always_inline u64 bio_came_ns(u64 bio, u64 now_ns)
{
	u64 mask = (1ull << MOMENT_BITS) - 1;
	u32 low = low_half(bio);
	u64 *moment = moment_of(low);
	u64 seen = moment ? *moment : 0;

	if (!low || !seen || (seen & ~mask) != tag_of(low))
		return now_ns;
	return now_ns - ((now_ns - seen) & mask);
}

/* The slot that has the request, else NO_SLOT. */
static __always_inline u32 slot_of(u64 request, struct request_set **set)
{
	u32 index = hash_of(low_half(request), SET_BITS), way;

	*set = bpf_map_lookup_elem(&set_by_hash, &index);
	if (!*set)
		return NO_SLOT;
	way = way_of((*set)->requests, request);
	return way == WAYS ? NO_SLOT : index * SLOTS_A_SET + way;
}

static __always_inline u32 take_slot(u64 request, struct request_set *set)
{
	u32 way = claim_way(set->requests, request);

	return way == WAYS ? NO_SLOT : hash_of(low_half(request), SET_BITS) * SLOTS_A_SET + way;
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
	for (u32 way = 0; way < WAYS; way++) {
		if (way == (slot & (SLOTS_A_SET - 1)))
			set->requests[way] = 0;
	}
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
