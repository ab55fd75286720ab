"""How the models that ship with stretto were made; nothing here is needed to use them."""
