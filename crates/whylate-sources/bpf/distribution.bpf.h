/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * A latency histogram of 64-bit counters that allocates memory for values that occur: the 496 buckets are cut into pages
 * of 16, and a page is allocated once a value falls into it. Most latencies of one handler span a few powers of two, so
 * a distribution takes about half a kilobyte instead of four.
 *
 * User space maps the same memory. It takes counts by atomic exchange with zero, so that none is counted twice or lost;
 * or, if each CPU has its own distribution, which needs no atomic instruction, by the difference to the last reading.
 */
#pragma once

#include "elements.bpf.h"
#include "histogram.bpf.h"

/* Functions without `static` are verified once, not at each call. */

enum {
	PAGE_BUCKETS = 16,
	DISTRIBUTION_PAGES = HISTOGRAM_BUCKETS / PAGE_BUCKETS,
	/* 8 MB of pages: as many as their numbers distinguish. */
	PAGE_NUMBER_BITS = 16,
	MAX_PAGES = 1 << PAGE_NUMBER_BITS,
	/* A failed attempt means that another CPU has set one of the two page numbers of a word. */
	PAGE_ATTEMPTS = 4,
};

/* Length of bucket_pages: user space reduces it if there are few series. */
const volatile u32 page_limit = MAX_PAGES;

struct distribution {
	u64 sum_ns;
	u64 max_ns;
	/* The complement of the smallest value, so that 0 means that there is none. */
	u64 inverted_min_ns;
	/* Index into bucket_pages, 0 if there is no page yet. */
	u16 pages[DISTRIBUTION_PAGES + 1] __attribute__((aligned(4)));
};

struct bucket_page {
	u64 counts[PAGE_BUCKETS];
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_PAGES);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct bucket_page);
} bucket_pages SEC(".maps");

/*
 * Allocates a page for a distribution; 0 if none is left. BPF exchanges whole words: `pair` has two page numbers, of
 * which the first is in the lower half, as x86 and arm64 are little-endian. A larger number would change both.
 */
__noinline u32 new_page(u32 *pair, u32 is_second)
{
	u32 shift = is_second ? PAGE_NUMBER_BITS : 0, page, taken = 0;

	if (!pair)
		return 0;
	page = take_element(&bucket_pages, page_limit < MAX_PAGES ? page_limit : MAX_PAGES);
	if (!page)
		return 0;
	for (u32 attempt = 0; attempt < PAGE_ATTEMPTS; attempt++) {
		u32 seen = *(volatile u32 *)pair;

		taken = seen >> shift & ((1 << PAGE_NUMBER_BITS) - 1);
		if (taken)
			break;
		if (__sync_val_compare_and_swap(pair, seen, seen | page << shift) == seen)
			return page;
	}
	/* Another CPU was faster. */
	return_element(&bucket_pages, page);
	return taken;
}

/* Every failed attempt means that another CPU raised the maximum concurrently: few are ever needed. */
__noinline int raise_contended(u64 *maximum, u64 value)
{
	if (!maximum)
		return 1;
	for (int attempt = 0; attempt < 64; attempt++) {
		u64 seen = *maximum;

		if (value <= seen || __sync_val_compare_and_swap(maximum, seen, value) == seen)
			return 0;
	}
	return 1;
}

static __always_inline void raise_to(u64 *maximum, u64 value)
{
	if (value > *maximum)
		raise_contended(maximum, value);
}

/* Counts a value; false if no page is left for it. `shared`: other CPUs count into it too. */
static __always_inline bool distribution_add(struct distribution *distribution, u64 value_ns, bool shared)
{
	u32 bucket = histogram_bucket(value_ns);
	u32 entry = (bucket / PAGE_BUCKETS) % (DISTRIBUTION_PAGES + 1);
	u32 index = distribution->pages[entry];
	struct bucket_page *page;

	if (!index) {
		index = new_page((u32 *)distribution->pages + entry / 2, entry % 2);
		if (!index)
			return false;
	}
	page = bpf_map_lookup_elem(&bucket_pages, &index);
	if (!page)
		return false;
	/* The count comes last: a reader that reads counts first finds every counted value in the sum. */
	if (shared) {
		__sync_fetch_and_add(&distribution->sum_ns, value_ns);
		__sync_fetch_and_add(&page->counts[bucket % PAGE_BUCKETS], 1);
	} else {
		distribution->sum_ns += value_ns;
		barrier();
		page->counts[bucket % PAGE_BUCKETS]++;
	}
	raise_to(&distribution->max_ns, value_ns);
	raise_to(&distribution->inverted_min_ns, ~value_ns);
	return true;
}

/* Variant for rare cases: not inlined. */
__noinline bool distribution_add_rare(struct distribution *distribution, u64 value_ns)
{
	return distribution && distribution_add(distribution, value_ns, true);
}
