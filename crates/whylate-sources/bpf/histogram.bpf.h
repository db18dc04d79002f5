/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which bucket of a latency histogram a value belongs to: the layout of the Rust crate `histogram` with a grouping
 * power of 3 and a maximum value power of 64. Compiles on the host too, where a test compares it with that crate.
 */
#pragma once

enum {
	/* Each power of two is cut into 2^3 buckets: a bucket is at most 12.5 % wide. */
	HISTOGRAM_GROUPING_POWER = 3,
	/* Values below 2^(3+1) have a bucket each. */
	HISTOGRAM_EXACT_BELOW = 1 << (HISTOGRAM_GROUPING_POWER + 1),
	HISTOGRAM_BUCKETS = 496,
};

static const unsigned char HIGHEST_BIT_OF_BYTE[256] = {
	0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4,
	5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5,
	6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6,
	6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6,
	7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
	7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
	7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
	7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7,
};

/*
 * Index of the highest set bit; 0 for 0. BPF has no instruction for it. Its byte is nearly always the same for one
 * handler, so the branches are predicted; its position within the byte is not, so that is looked up.
 */
static inline __attribute__((always_inline)) unsigned int highest_bit(unsigned long long value)
{
	unsigned int bit = 0;

	if (value >> 32) {
		value >>= 32;
		bit += 32;
	}
	if (value >> 16) {
		value >>= 16;
		bit += 16;
	}
	if (value >> 8) {
		value >>= 8;
		bit += 8;
	}
	return bit + HIGHEST_BIT_OF_BYTE[value & 0xff];
}

static inline __attribute__((always_inline)) unsigned int histogram_bucket(unsigned long long value)
{
	unsigned int power, within;

	if (value < HISTOGRAM_EXACT_BELOW)
		return (unsigned int)value;
	power = highest_bit(value);
	/* The three bits after the highest one. */
	within = (unsigned int)(value >> (power - HISTOGRAM_GROUPING_POWER)) & ((1U << HISTOGRAM_GROUPING_POWER) - 1);
	return ((power - HISTOGRAM_GROUPING_POWER + 1) << HISTOGRAM_GROUPING_POWER) + within;
}
