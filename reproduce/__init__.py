"""The paper's experiments on real data, made with the library: settings, studies, figures. Not part of the package."""
