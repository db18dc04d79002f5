// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * How long I/O requests take: submitted -> made (throttling, no free request) -> issued to the device -> completed.
 */
#include "kernel_types.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include "compat.bpf.h"
#include "pid_namespace.bpf.h"
#include "ways.bpf.h"
#include "distribution.bpf.h"
#include "settings.bpf.h"
#include "requests.bpf.h"
#include "series.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Nothing is ever in it: it puts the types that user space shares into the skeleton. */
struct {
	struct done_request done_request;
	struct block_key block_key;
	struct request_set request_set;
	enum lost_reason lost_reason;
	enum operation operation;
	enum request_limits request_limits;
	enum series_limits series_limits;
	enum distribution_kind distribution_kind;
} layouts = {};

struct {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 1 << 20);
} late_requests SEC(".maps");

enum {
	MOST_CPUS = 1024,
};

/* Requests that were done on each CPU. */
u64 done_count[MOST_CPUS] = {};

/* Since 5.x each bio that may become a request passes here once, after limits of cgroups have let it pass. */
SEC("tp_btf/block_bio_queue")
int BPF_PROG(on_block_bio_queue, struct bio *bio)
{
	if (enabled)
		bio_comes((u64)bio, bpf_ktime_get_ns());
	return 0;
}

/* 6.5; in the thread that submits it. */
SEC("?tp_btf/block_io_start")
int BPF_PROG(on_block_io_start, struct request *request)
{
	if (enabled && (!wanted_device || wanted_device == device_of(request)))
		request_begins(request, false);
	return 0;
}

/* Stands in for on_block_io_start(), with on_block_rq_issue(): it comes for requests that are not issued at once. */
SEC("?tp_btf/block_rq_insert")
int BPF_PROG(on_block_rq_insert, struct request *request)
{
	struct request_set *set;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	if (slot_of((u64)request, &set) == NO_SLOT)
		request_begins(request, false);
	return 0;
}

SEC("tp_btf/block_rq_issue")
int BPF_PROG(on_block_rq_issue, struct request *request)
{
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	slot = slot_of((u64)request, &set);
	if (slot == NO_SLOT) {
		/* A flush of the block layer's own, or the kernel has no event of a request's begin. */
		request_begins(request, true);
		return 0;
	}
	begun = request_in(slot);
	if (begun) {
		begun->issued_ns = bpf_ktime_get_ns();
		/* With all that has been merged into it; one that flushes may have been emptied. */
		if (request->__data_len)
			begun->facts.bytes = request->__data_len;
	}
	return 0;
}

/* Its bios have become those of the request before it: that one goes on with them, and this one is not heard of again. */
SEC("tp_btf/block_rq_merge")
int BPF_PROG(on_block_rq_merge, struct request *request)
{
	struct request_set *set;
	u32 slot;

	if (!enabled)
		return 0;
	slot = slot_of((u64)request, &set);
	if (slot != NO_SLOT && set)
		forget(set, slot);
	return 0;
}

static __always_inline void keep(const struct block_request *request, u64 now_ns, s32 error)
{
	u32 cpu = bpf_get_smp_processor_id(), index;
	struct done_request *done;
	u64 position;

	if (cpu >= MOST_CPUS)
		return;
	position = __sync_fetch_and_add(&done_count[cpu], 1);
	index = cpu * done_by_cpu + (position & (done_by_cpu - 1));
	done = bpf_map_lookup_elem(&done_by_position, &index);
	if (!done)
		return;
	done->position = ~position;
	barrier();
	done->request = *request;
	done->completed_ns = now_ns;
	done->error = error;
	done->cpu = cpu;
	barrier();
	done->position = position;
}

static __always_inline void report(const struct block_request *request, u64 now_ns, s32 error)
{
	struct done_request *late = bpf_ringbuf_reserve(&late_requests, sizeof(*late), 0);

	if (!late) {
		lose(LOST_LATE_EVENTS);
		return;
	}
	late->position = 0;
	late->request = *request;
	late->completed_ns = now_ns;
	late->error = error;
	late->cpu = bpf_get_smp_processor_id();
	bpf_ringbuf_submit(late, 0);
}

/* It comes for each part that is done, and before those who wait are woken. */
SEC("tp_btf/block_rq_complete")
int BPF_PROG(on_block_rq_complete, struct request *request, int error, unsigned int bytes)
{
	u64 now_ns = bpf_ktime_get_ns();
	struct block_request *begun;
	struct request_set *set;
	u32 slot;

	if (!enabled || (wanted_device && wanted_device != device_of(request)))
		return 0;
	if (!is_last_part(request, bytes))
		return 0;
	slot = slot_of((u64)request, &set);
	begun = slot == NO_SLOT ? NULL : request_in(slot);
	if (!begun) {
		lose(LOST_UNMATCHED);
		return 0;
	}
	/* One that only flushes has no turn at the device itself: the block layer's own flush has. */
	if (!begun->issued_ns)
		begun->issued_ns = begun->made_ns;
	count_done(begun, now_ns, error);
	if (keep_done)
		keep(begun, now_ns, error);
	if (late_over_ns && since(now_ns, begun->submitted_ns) >= late_over_ns)
		report(begun, now_ns, error);
	forget(set, slot);
	return 0;
}
