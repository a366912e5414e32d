//! Tables of numbers, printed row by row as the numbers come.
//!
//! Guarantees: a number never makes its column wider while fewer decimals would do; a cell that is still too wide
//! pushes its row to the right rather than being cut.

/// A column: its heading, the unit below it, and its width in characters.
pub(crate) struct Column {
    pub(crate) heading: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) width: usize,
}

/// The columns of a table.
pub(crate) struct Table {
    columns: Vec<Column>,
}

impl Table {
    pub(crate) fn new(columns: impl IntoIterator<Item = (&'static str, &'static str, usize)>) -> Self {
        let columns = columns.into_iter().map(|(heading, unit, width)| Column { heading, unit, width }).collect();
        Self { columns }
    }

    /// The headings and the units, as two lines that start with "#" like every line that is no row.
    pub(crate) fn headings(&self) -> [String; 2] {
        let line = |text: fn(&Column) -> &'static str| {
            let mut line = self.row(&self.columns.iter().map(|column| text(column).to_owned()).collect::<Vec<_>>());
            // The first column is right-aligned and leaves room for the mark.
            line.replace_range(..1, "#");
            line
        };
        [line(|column| column.heading), line(|column| column.unit)]
    }

    /// How many characters these columns take, with the spaces between them.
    pub(crate) fn width_of(&self, columns: std::ops::Range<usize>) -> usize {
        let columns = &self.columns[columns];
        columns.iter().map(|column| column.width + 2).sum::<usize>().saturating_sub(2)
    }

    /// One row of texts: every cell left-aligned in its column.
    pub(crate) fn left_row(&self, cells: &[String]) -> String {
        let padded: Vec<_> = self
            .columns
            .iter()
            .zip(cells)
            .map(|(column, cell)| format!("{cell:<width$}", width = column.width))
            .collect();
        padded.join("  ").trim_end().to_owned()
    }

    /// One row: every cell right-aligned in its column, two spaces between columns.
    pub(crate) fn row(&self, cells: &[String]) -> String {
        let padded: Vec<_> = self
            .columns
            .iter()
            .zip(cells)
            .map(|(column, cell)| format!("{cell:>width$}", width = column.width))
            .collect();
        padded.join("  ")
    }
}

/// A number in at most `width` characters: with two decimals when they fit, then one, none, then in powers of ten.
pub(crate) fn number(value: f64, width: usize) -> String {
    (0..=2)
        .rev()
        .map(|decimals| format!("{value:.decimals$}"))
        .find(|text| text.len() <= width)
        .unwrap_or_else(|| format!("{value:.0e}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_gives_up_decimals_before_width() {
        assert_eq!(number(2.54321, 6), "2.54");
        assert_eq!(number(1234.56, 6), "1234.6");
        assert_eq!(number(123_456.7, 6), "123457");
        assert_eq!(number(12_345_678.0, 7), "1e7");
        assert_eq!(number(f64::NAN, 6), "NaN");
    }

    #[test]
    fn cells_stand_below_their_headings() {
        let table = Table::new([("size", "(B)", 8), ("time", "(us)", 7)]);
        assert_eq!(table.headings(), ["#   size     time", "#    (B)     (us)"]);
        assert_eq!(table.row(&["8".into(), "1.50".into()]), "       8     1.50");
    }
}
