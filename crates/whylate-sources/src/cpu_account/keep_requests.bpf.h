/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Disk requests, from submission to completion: 0.3 us each, in three programs. */
#pragma once

#include "disks.bpf.h"
#include "keep_edges.bpf.h"

/* Requests in progress. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	/* User space makes it REQUESTS long where edges are kept. */
	__uint(max_entries, 1);
	__type(key, u64);
	__type(value, struct disk_request);
} requests_by_address SEC(".maps");

/* Completed requests. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	/* User space makes it as long as the intervals need it. */
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct disk_request);
} requests_by_position SEC(".maps");

static __always_inline struct disk_request *request_at(const struct account *account, u32 cpu, u32 position)
{
	u32 index = index_of_detail(account, cpu, position);

	return bpf_map_lookup_elem(&requests_by_position, &index);
}

static __always_inline u8 operation_of(u32 flags, u32 bytes)
{
	switch (flags & REQ_OP_MASK) {
	case REQ_OP_READ:
		return DISK_READS;
	case REQ_OP_WRITE:
		/* An empty write stands for the flush before it. */
		return bytes ? DISK_WRITES : DISK_FLUSHES;
	case REQ_OP_FLUSH:
		return DISK_FLUSHES;
	default:
		return DISK_DOES_OTHER;
	}
}

static __always_inline void describe_request(struct disk_request *to, const struct request *request)
{
	to->operation = operation_of(request->cmd_flags, request->__data_len);
	to->has_flush = has_flush(request->cmd_flags);
}

/* Looks a request up by its address or, if only its bio was seen so far, by the bio's address. */
static __always_inline struct disk_request *pending_request(const struct request *request, u64 *key)
{
	struct disk_request *pending;
	u64 bio;

	*key = (u64)request;
	pending = bpf_map_lookup_elem(&requests_by_address, key);
	if (pending)
		return pending;
	bio = (u64)untrusted(struct request, request)->bio;
	if (!bio)
		return NULL;
	*key = bio;
	return bpf_map_lookup_elem(&requests_by_address, key);
}

static __always_inline void add_pending(u64 key, struct disk_request *pending)
{
	struct account *account = account_of(bpf_get_smp_processor_id());

	if (!account)
		return;
	if (!account->is_busy && !account->softirq && !is_in_irq(account)) {
		if (in_unseen_interrupt(account))
			count_unseen_interrupt(account);
		else
			pending->submitter = shown_number(bpf_get_current_task_btf());
	}
	/* The memory may be reused from a request that never completed. */
	if (bpf_map_update_elem(&requests_by_address, &key, pending, BPF_ANY))
		__sync_fetch_and_add(&account->requests_full, 1);
}

static __always_inline void request_begins(const struct request *request, u32 device, bool is_issued)
{
	u64 now_ns = bpf_ktime_get_ns();
	struct disk_request pending = { .queued_ns = now_ns, .issued_ns = is_issued ? now_ns : 0, .device = device };

	describe_request(&pending, request);
	add_pending((u64)request, &pending);
}

SEC("?tp_btf/block_io_start")
int BPF_PROG(on_block_io_start, struct request *request)
{
	request_begins(request, device_of(request), false);
	return 0;
}

/* Before 6.5 this shows the submitter, except of requests that go to the device at once or have a flush. */
SEC("?tp_btf/block_rq_insert")
int BPF_PROG(on_block_rq_insert, struct request *request)
{
	u64 key;

	if (!pending_request(request, &key))
		request_begins(request, device_of(untrusted(struct request, request)), false);
	return 0;
}

/* Before 6.5 a worker inserts requests with a flush, if anything does; the bio still shows the submitter. */
SEC("?tp_btf/block_getrq")
int BPF_PROG(on_block_getrq, struct bio *bio)
{
	struct disk_request pending = { .queued_ns = bpf_ktime_get_ns(), .has_flush = true };

	if (!has_flush(bio->bi_opf))
		return 0;
	pending.operation = operation_of(bio->bi_opf, bio->bi_iter.bi_size);
	add_pending((u64)bio, &pending);
	return 0;
}

SEC("?tp_btf/block_rq_issue")
int BPF_PROG(on_block_rq_issue, struct request *request)
{
	u64 key;
	struct disk_request *pending = pending_request(request, &key);

	if (pending)
		pending->issued_ns = bpf_ktime_get_ns();
	else
		request_begins(request, device_of(untrusted(struct request, request)), true);
	return 0;
}

/* An empty flush request completes with another request's flush and is never issued: it takes that flush's issue time. */
static __always_inline void take_over_flush(struct disk_request *done, const struct account *account, u32 cpu)
{
	u32 before = account->completed[is_in_irq(account)];
	const struct disk_request *flush;

	if (!before)
		return;
	flush = request_at(account, cpu, before - 1);
	if (flush && flush->operation == DISK_FLUSHES && flush->device == done->device)
		done->issued_ns = flush->issued_ns;
}

/* Comes before the waiters are woken. In a thread's own context that thread is recorded as the waker. */
SEC("?tp_btf/block_rq_complete")
int BPF_PROG(on_block_rq_complete, struct request *request, int error, unsigned int bytes)
{
	u32 cpu = bpf_get_smp_processor_id(), position;
	struct account *account = account_of(cpu);
	struct disk_request *pending, *done;
	u64 key;

	if (!account)
		return 0;
	pending = pending_request(request, &key);
	if (!pending)
		account->requests_unseen++;
	if (!account->is_busy && (is_in_irq(account) || account->softirq) && !in_unseen_interrupt(account)) {
		position = __sync_fetch_and_add(&account->completions, 1);
		done = request_at(account, cpu, position);
		if (!done)
			return 0;
		/* User space may be reading. */
		store_in_order(&done->position, ~position);
		done->queued_ns = pending ? pending->queued_ns : 0;
		done->issued_ns = pending ? pending->issued_ns : 0;
		done->submitter = pending ? pending->submitter : 0;
		/* A bio that was seen before its request has no device yet. */
		done->device = pending && pending->device ? pending->device : device_of(untrusted(struct request, request));
		describe_request(done, request);
		if (pending)
			done->operation = pending->operation;
		if (pending && !pending->issued_ns && !bytes)
			take_over_flush(done, account, cpu);
		store_in_order(&done->position, position);
		account->completed[is_in_irq(account)] = position + 1;
	}
	/* A request with a flush has a function of its own that ends each part but the last. */
	if (pending && bytes >= request->__data_len && !(pending->has_flush && request->end_io))
		bpf_map_delete_elem(&requests_by_address, &key);
	return 0;
}
