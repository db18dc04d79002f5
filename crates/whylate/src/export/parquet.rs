// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tables as Parquet.

use std::mem::take;
use std::sync::Arc;

use parquet::basic::{Compression, LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::data_type::{BoolType, ByteArray, ByteArrayType, DataType, DoubleType, Int64Type};
use parquet::errors::ParquetError;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{ColumnPath, Type};

use super::tables::{Cell, Column, Kind, Row, Sink, Table};
use crate::files::PendingFile;

/// A group of rows is kept in memory until it is written: so many cells, or so many bytes of text, whichever comes first.
const GROUP_CELLS: usize = 500_000;
const GROUP_BYTES: usize = 8 << 20;
/// Columns of names repeat a few; what does not fit is written as it is.
const DICTIONARY_BYTES: usize = 256 << 10;

/// A file for each table.
pub struct Files(Vec<File>);

struct File {
    writer: SerializedFileWriter<PendingFile>,
    columns: Vec<Values>,
    rows: usize,
    bytes: usize,
}

/// The values of a column that are not written yet, and for each row whether it has one.
struct Values {
    are: Vec<i16>,
    of: Of,
}

enum Of {
    Text(Vec<ByteArray>),
    Whole(Vec<i64>),
    Number(Vec<f64>),
    Flag(Vec<bool>),
}

impl Files {
    /// With no rows yet.
    pub fn begin(files: Vec<PendingFile>) -> Result<Self, ParquetError> {
        let all = Table::ALL.into_iter().zip(files).map(|(table, file)| File::begin(table, file));
        Ok(Files(all.collect::<Result<_, _>>()?))
    }
}

impl Sink for Files {
    fn add(&mut self, table: Table, row: Row<'_>) -> anyhow::Result<()> {
        Ok(self.0[table as usize].add(row)?)
    }

    fn end(self: Box<Self>) -> anyhow::Result<()> {
        for mut file in self.0 {
            file.write_group()?;
            file.writer.into_inner()?.end()?;
        }
        Ok(())
    }
}

impl File {
    fn begin(table: Table, file: PendingFile) -> Result<File, ParquetError> {
        let columns = table.columns();
        let fields = columns.iter().map(|column| Ok(Arc::new(field(column)?)));
        let fields = fields.collect::<Result<Vec<_>, ParquetError>>()?;
        let schema = Type::group_type_builder(table.name()).with_fields(fields).build()?;
        // Numbers repeat too little for dictionaries, which cost memory in each column.
        let mut properties = WriterProperties::builder()
            .set_created_by(format!("whylate {}", env!("CARGO_PKG_VERSION")))
            .set_compression(Compression::SNAPPY)
            .set_dictionary_enabled(false)
            .set_dictionary_page_size_limit(DICTIONARY_BYTES);
        for column in columns.iter().filter(|column| column.kind == Kind::Text) {
            properties = properties.set_column_dictionary_enabled(ColumnPath::from(column.name), true);
        }
        let writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties.build()))?;
        let columns = columns.iter().map(|column| Values { are: Vec::new(), of: Of::empty(column.kind) }).collect();
        Ok(File { writer, columns, rows: 0, bytes: 0 })
    }

    fn add(&mut self, row: Row<'_>) -> Result<(), ParquetError> {
        for (into, (_, cell)) in self.columns.iter_mut().zip(row) {
            self.bytes += into.add(cell);
        }
        self.rows += 1;
        if self.rows * self.columns.len() >= GROUP_CELLS || self.bytes >= GROUP_BYTES {
            self.write_group()?;
        }
        Ok(())
    }

    fn write_group(&mut self) -> Result<(), ParquetError> {
        if self.rows == 0 {
            return Ok(());
        }
        let mut group = self.writer.next_row_group()?;
        for column in &mut self.columns {
            let are = take(&mut column.are);
            match &mut column.of {
                Of::Text(values) => write::<ByteArrayType>(&mut group, &take(values), &are),
                Of::Whole(values) => write::<Int64Type>(&mut group, &take(values), &are),
                Of::Number(values) => write::<DoubleType>(&mut group, &take(values), &are),
                Of::Flag(values) => write::<BoolType>(&mut group, &take(values), &are),
            }?;
        }
        group.close()?;
        (self.rows, self.bytes) = (0, 0);
        Ok(())
    }
}

fn write<T: DataType>(
    group: &mut SerializedRowGroupWriter<'_, PendingFile>,
    values: &[T::T],
    are: &[i16],
) -> Result<(), ParquetError> {
    if let Some(mut column) = group.next_column()? {
        column.typed::<T>().write_batch(values, Some(are), None)?;
        column.close()?;
    }
    Ok(())
}

/// All may be missing: a source tells what it knows.
fn field(column: &Column) -> Result<Type, ParquetError> {
    let (physical, logical) = match column.kind {
        Kind::Text => (Physical::BYTE_ARRAY, Some(LogicalType::String)),
        Kind::Count => (Physical::INT64, Some(LogicalType::integer(64, false))),
        Kind::Stamp => (Physical::INT64, Some(LogicalType::timestamp(true, TimeUnit::MICROS))),
        Kind::Number => (Physical::DOUBLE, None),
        Kind::Flag => (Physical::BOOLEAN, None),
    };
    let field = Type::primitive_type_builder(column.name, physical);
    field.with_repetition(Repetition::OPTIONAL).with_logical_type(logical).build()
}

impl Of {
    fn empty(kind: Kind) -> Of {
        match kind {
            Kind::Text => Of::Text(Vec::new()),
            Kind::Count | Kind::Stamp => Of::Whole(Vec::new()),
            Kind::Number => Of::Number(Vec::new()),
            Kind::Flag => Of::Flag(Vec::new()),
        }
    }
}

impl Values {
    /// Returns how many bytes of text it has.
    fn add(&mut self, cell: Cell<'_>) -> usize {
        let mut bytes = 0;
        let is = match (&mut self.of, cell) {
            (Of::Text(values), Cell::Text(Some(text))) => {
                bytes = text.len();
                values.push(ByteArray::from(text.into_owned().into_bytes()));
                true
            }
            // An unsigned number has the bits of a signed one.
            (Of::Whole(values), Cell::Count(Some(number))) => {
                values.push(number as i64);
                true
            }
            // As recordings have them, and as all engines compare them.
            (Of::Whole(values), Cell::Stamp(Some(unix_ns))) => {
                values.push((unix_ns / 1_000) as i64);
                true
            }
            (Of::Number(values), Cell::Number(Some(number))) => {
                values.push(number);
                true
            }
            (Of::Flag(values), Cell::Flag(Some(flag))) => {
                values.push(flag);
                true
            }
            _ => false,
        };
        self.are.push(i16::from(is));
        bytes
    }
}
